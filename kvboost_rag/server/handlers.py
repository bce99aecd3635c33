"""Exceptions to responses, each in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.running import ClientGone

__all__ = ["HANDLERS"]

_LONGEST_NAME = 200
_NO_JSON = "the body can not be read as JSON; send JSON in UTF-8, not compressed, with 'Content-Type: application/json'"
_NO_PATH = "there is no such path; ask /v1/chat/completions, /v1/completions, /v1/models or /v1/documents"
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_too_slow", 413: "request_too_large"}


def _told(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, dict(error.headers))


async def _api_error(request: Request, error: ApiError) -> Response:
    return _told(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    status = error.status_code
    if status == 400:
        # FastAPI's own, for a body that it can not decode.
        return _told(ApiError(400, _NO_JSON, "invalid_json"))
    detail = _NO_PATH if status == 404 else error.detail
    return _told(ApiError(status, detail, _CODES.get(status, "bad_request"), headers=error.headers or {}))


async def _gone(request: Request, error: ClientGone) -> Response:
    # Nobody reads it; the number is the one that access logs know.
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    return _told(ApiError(500, "the server failed; its log says why", "server_error"))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    """Tell one thing that is wrong with a request: of alternatives that were tried, the one that came furthest."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return _told(ApiError(400, f"the body is no JSON: {first['ctx']['error']}", "invalid_json"))
    if isinstance(error.body, bytes):
        # What comes under another type is taken as it is.
        return _told(ApiError(400, _NO_JSON, "invalid_json"))
    where = first.get("ctx", {}).get("param") or _where(first["loc"], error.body)
    if first["type"] == "extra_forbidden":
        return _told(ApiError(400, f"{where!r} is not known; leave it out", "unknown_parameter", where))
    code = first["type"] if first["type"] == "unsupported_value" else "invalid_value"
    message = first["msg"] if where in first["msg"] else f"{where}: {first['msg']}"
    return _told(ApiError(400, message, code, where or None))


def _where(loc: Sequence[Any], body: Any) -> str:
    """Write where in body or query something is; names of alternatives that a validator tried are left out."""
    if loc[0] != "body":
        return str(loc[-1])
    out = ""
    for part in loc[1:]:
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            out, body = f"{out}[{part}]", body[part]
        elif isinstance(body, dict) and isinstance(part, str) and (part in body or part == loc[-1]):
            out, body = f"{out}.{part}" if out else part, body.get(part)
    return out[:_LONGEST_NAME]


HANDLERS: dict[type[Exception], Callable[[Request, Any], Any]] = {
    ApiError: _api_error,
    RequestValidationError: _invalid,
    HTTPException: _http_error,
    ClientGone: _gone,
    Exception: _failed,
}
