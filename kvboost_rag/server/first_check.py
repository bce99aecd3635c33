"""The key is looked at before anything of the body is read."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost_rag.server.auth import Keys
from kvboost_rag.server.errors import ApiError

__all__ = ["CheckKey"]

_OPEN_TO_ALL = "/health"


class CheckKey:
    """Middleware that refuses whoever has no key, so that strangers make the server hold no bodies.

    FastAPI reads the body before it asks a route's dependencies, which say what a key may do.

    Parameters
    ----------
    app
        What answers everybody else.
    keys
        Who may ask.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        answers: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] != _OPEN_TO_ALL:
            try:
                self._keys.namespace(Headers(scope=scope).get("authorization"))
            except ApiError as error:
                answers = JSONResponse(error.body, error.status, dict(error.headers))
        await answers(scope, receive, send)
