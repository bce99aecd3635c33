"""What the front knows of the requests that it has let in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost_rag.server.draining import broken_off, refused
from kvboost_rag.server.running import unless

__all__ = ["CountRunning", "FrontRequests"]

T = TypeVar("T")
_ALWAYS_ANSWERED = ("/health", "/metrics")


class FrontRequests:
    """Counts requests, and breaks them off when the front must not wait any longer.

    Parameters
    ----------
    send_timeout
        Seconds after which a stream is broken off whose client has stopped to read.

    Attributes
    ----------
    busy, is_draining, is_over
        As :class:`kvboost_rag.server.draining.Requests` says.
    """

    def __init__(self, send_timeout: float) -> None:
        self.send_timeout = send_timeout
        self.busy = 0
        self.is_draining = False
        self._is_over = False
        self._ends: set[asyncio.Future[None]] = set()
        self._registry = CollectorRegistry()
        self.stuck = Counter(
            "kvboost_stuck_streams", "Streams broken off because nobody read them any more", registry=self._registry
        )

    @property
    def is_over(self) -> bool:
        """Whether those that run are broken off."""
        return self._is_over

    @is_over.setter
    def is_over(self, value: bool) -> None:
        self._is_over = value
        for end in self._ends if value else ():
            end.set_result(None)
        self._ends.clear()

    async def unless_over(self, work: Awaitable[T]) -> T:
        """Await something for as long as the front may wait.

        Raises
        ------
        ApiError
            503 if it may not any longer; the work is cancelled then.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_over:
            end.set_result(None)
        else:
            self._ends.add(end)
        try:
            return await unless(end, work, broken_off())
        finally:
            self._ends.discard(end)

    def figures(self) -> str:
        """Write the front's own figures in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class CountRunning:
    """Middleware that counts the requests that are answered, and refuses new ones while the front drains.

    Parameters
    ----------
    app
        What answers.
    requests
        Where they are counted.
    """

    def __init__(self, app: ASGIApp, requests: FrontRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in _ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
        elif self._requests.is_draining:
            error = refused()
            await JSONResponse(error.body, error.status, dict(error.headers))(scope, receive, send)
        else:
            self._requests.busy += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._requests.busy -= 1
