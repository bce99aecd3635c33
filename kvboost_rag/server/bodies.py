"""How large a request's body may be, and how long it may take to come."""

from __future__ import annotations

import asyncio

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LimitBody"]


class LimitBody:
    """Middleware that breaks off a body that is too large or too slow.

    Starlette's own answers in plain text, which OpenAI's clients do not read.

    Parameters
    ----------
    app
        What reads the body.
    max_bytes
        Of the body.
    seconds
        From the last of the headers to its last byte.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = 60.0) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            announced = int(Headers(scope=scope).get("content-length", 0))
            receive = _Limited(receive, announced, self._max_bytes, self._seconds)
        await self._app(scope, receive, send)


class _Limited:
    def __init__(self, receive: Receive, announced: int, max_bytes: int, seconds: float) -> None:
        self._receive = receive
        self._announced = announced
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._came = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        self._check(self._announced)
        message = await self._in_time()
        self._came += len(message.get("body", b""))
        self._check(self._came)
        self._is_whole = not message.get("more_body", False)
        return message

    async def _in_time(self) -> Message:
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError as error:
            raise HTTPException(
                408, f"the request took more than {self._seconds:g} seconds to arrive; send it at once, or less of it",
                {"Connection": "close"},
            ) from error

    def _check(self, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise HTTPException(413, "the request is too large; send fewer or shorter documents")
