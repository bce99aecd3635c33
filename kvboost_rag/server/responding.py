"""Items of a worker thread to a response: whole, or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvboost_rag.report import Result
from kvboost_rag.server.asking import Item
from kvboost_rag.server.running import unless_gone
from kvboost_rag.server.service import Service
from kvboost_rag.server.sse import EventStream
from kvboost_rag.structured import Piece

__all__ = ["Wire", "respond"]


class Wire(Protocol):
    """How one answer is written."""

    def whole(self, pieces: list[Piece], result: Result) -> dict[str, Any]:
        """Write all of it."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """Write what stands before its first piece."""

    def step(self, pieces: list[Piece]) -> Iterable[dict[str, Any]]:
        """Write new pieces."""

    def end(self, result: Result) -> Iterable[dict[str, Any]]:
        """Write how it ended."""


async def respond(
    service: Service, request: Request, items: AsyncGenerator[Item | None, None], wire: Wire, *, streamed: bool
) -> Response:
    """Answer a request.

    Nothing is sent before the first token is there, so that whatever fails until then has its own status.
    """
    arrived = time.perf_counter()
    answer = _without_documents(items)
    first = await unless_gone(request, anext(answer))
    service.metrics.ttft.observe(time.perf_counter() - arrived)
    followed = _counted(service, first, answer)
    if streamed:
        return EventStream(service, _events(followed, wire), items)
    async with aclosing(items):
        return JSONResponse(await unless_gone(request, _whole(followed, wire)))


async def _without_documents(items: AsyncIterator[Item | None]) -> AsyncGenerator[Item, None]:
    async for item in items:
        if item is not None:
            yield item


async def _counted(service: Service, first: Item, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    yield first
    async for item in items:
        if isinstance(item, Result):
            service.metrics.answer_tokens.inc(item.completion_tokens)
        yield item


async def _whole(items: AsyncIterator[Item], wire: Wire) -> dict[str, Any]:
    pieces: list[Piece] = []
    async for item in items:
        if isinstance(item, Result):
            return wire.whole(pieces, item)
        pieces += item
    raise RuntimeError("an answer ended without its result")


async def _events(items: AsyncIterator[Item], wire: Wire) -> AsyncIterator[dict[str, Any]]:
    for event in wire.begin():
        yield event
    async for item in items:
        for event in wire.end(item) if isinstance(item, Result) else wire.step(item):
            yield event
