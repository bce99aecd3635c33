"""Counts requests by path and status."""

from __future__ import annotations

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CountRequests"]


class CountRequests:
    """Middleware that counts each response.

    Parameters
    ----------
    app
        What answers.
    requests
        With the labels ``path``, which is the route's and never what a client wrote, and ``status``.
    """

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count its response."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
