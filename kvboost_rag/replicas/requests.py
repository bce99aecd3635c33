"""What the front knows of the requests that it has let in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_rag.server.draining import broken_off, refused
from kvboost_rag.server.running import leave, unless

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
            # One that has just been let go is cancelled already.
            if not end.done():
                end.set_result(None)

    async def unless_over(self, work: Awaitable[T]) -> T:
        """Await something for as long as the front may wait.

        Raises
        ------
        ApiError
            503 if it may not any longer; the work is cancelled then, or never begun.
        """
        if self._is_over:
            leave(work)
            raise broken_off()
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            return await unless(end, work, broken_off())
        finally:
            self._ends.discard(end)

    @contextmanager
    def counting(self) -> Iterator[Callable[[], None]]:
        """Yield what is to be called when a request is whole; it counts from then until this is over."""
        counted = False

        def whole() -> None:
            nonlocal counted
            self.busy += not counted
            counted = True

        try:
            yield whole
        finally:
            self.busy -= counted

    def figures(self) -> str:
        """Write the front's own figures in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class CountRunning:
    """Middleware that counts the requests that are answered, and refuses new ones while the front drains.

    A request counts once all of it is there: nobody waits for one whose body is slow to come.

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
            with self._requests.counting() as whole:
                await self._app(scope, _telling(receive, whole), send)


def _telling(receive: Receive, whole: Callable[[], None]) -> Receive:
    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            whole()
        return message

    return received
