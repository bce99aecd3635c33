"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvboost_rag.report import Result
from kvboost_rag.server.asking import answer_completion
from kvboost_rag.server.reports import report_of, usage_of
from kvboost_rag.server.responding import respond
from kvboost_rag.server.running import working
from kvboost_rag.server.schemas import CompletionRequest
from kvboost_rag.server.service import Caller, Served, new_id
from kvboost_rag.structured import Piece

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request, service: Served, caller: Caller) -> Response:
    """Continue a text, whole or as a stream."""
    service.check_model(body.model)
    since = caller.writes.since()
    items = working(service, caller, lambda: answer_completion(caller, body, service.limits, since))
    return await respond(service, request, items, CompletionWire(body), streamed=bool(body.stream))


class CompletionWire:
    """Writes one continuation.

    Parameters
    ----------
    body
        The request.
    """

    def __init__(self, body: CompletionRequest) -> None:
        self._includes_usage = body.includes_usage
        self._head = {
            "id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": body.model,
        }  # fmt: skip

    def whole(self, pieces: list[Piece], result: Result) -> dict[str, Any]:
        """Write all of it."""
        written = self._written("".join(piece.text for piece in pieces), result.finish_reason)
        return {**written, "usage": usage_of(result), "kvboost": report_of(result)}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Write nothing."""
        return iter(())

    def step(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Write new text."""
        for piece in pieces:
            yield self._event(piece.text)

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Write how it ended, and the usage if it is asked for."""
        yield self._event("", result.finish_reason) | {"kvboost": report_of(result)}
        if self._includes_usage:
            yield {**self._head, "choices": [], "usage": usage_of(result)}

    def _event(self, text: str, reason: str | None = None) -> dict[str, Any]:
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._written(text, reason), **usage}

    def _written(self, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
