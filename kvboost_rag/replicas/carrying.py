"""A request and its response as plain values, and an ASGI application that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypedDict

from starlette.types import ASGIApp, Message, Scope

__all__ = ["Asked", "Begun", "answered"]

Headers = list[tuple[bytes, bytes]]


class Asked(TypedDict):
    """A request."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


class Begun(TypedDict):
    """A response up to its first bytes, which are all of it unless it is a stream of events."""

    status: int
    headers: Headers
    body: bytes


async def answered(app: ASGIApp, asked: Asked) -> AsyncGenerator[Begun | bytes, None]:
    """Let an application answer; yields the response's beginning, then what follows as it comes.

    A response that is no stream of events comes as one item, so that whoever has it has all of it. Closing this tells
    the application that the client is gone, and waits until it is done.

    Raises
    ------
    RuntimeError
        If the application does not answer.
    """
    exchange = _Exchange(asked)
    running = asyncio.ensure_future(exchange.run(app))
    try:
        start = await exchange.next()
        if start is None:
            await running
            raise RuntimeError("the application did not answer")
        headers = list(start["headers"])
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        first = await exchange.part() if is_stream else b"".join([part async for part in exchange.parts()])
        yield {"status": start["status"], "headers": headers, "body": first}
        async for part in exchange.parts():
            yield part
        await running
    finally:
        exchange.gone.set()
        await asyncio.wait([running])


class _Exchange:
    """The application's side of one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._is_read = self._is_over = False
        self.gone = asyncio.Event()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(), self._receive, self._sent.put)
        finally:
            self._sent.put_nowait(None)

    async def next(self) -> Message | None:
        return await self._sent.get()

    async def part(self) -> bytes:
        message = await self.next()
        self._is_over = message is None or not message.get("more_body", False)
        return b"" if message is None else bytes(message.get("body", b""))

    async def parts(self) -> AsyncGenerator[bytes, None]:
        while not self._is_over:
            if part := await self.part():
                yield part

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._asked["body"], "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def _scope(self) -> Scope:
        path = self._asked["path"]
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": self._asked["method"], "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": self._asked["query"], "headers": self._asked["headers"], "client": None, "server": None,
        }  # fmt: skip
