"""Work in threads for requests in an event loop: one thread runs all of a request, and stops when nobody listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread
from fastapi import Request

from kvboost_rag.server.errors import api_error
from kvboost_rag.server.service import Service, Tenant

__all__ = ["ClientGone", "leave", "unless", "unless_gone", "working"]

T = TypeVar("T")
_END: Final = object()


class ClientGone(Exception):
    """The client has closed the connection."""


async def working(
    service: Service, caller: Tenant, start: Callable[[], Generator[T, None, None]]
) -> AsyncGenerator[T, None]:
    """Wait for a place, then run a generator in a thread, and yield what it yields.

    Closing this closes that, at its next item, and returns when the thread has let go of it.

    Raises
    ------
    ApiError
        If there is no place, or for what the engine refuses.
    """
    try:
        async with service.admission.place(caller.namespace), aclosing(_in_thread(service, start)) as items:
            async for item in items:
                yield item
    except Exception as error:
        told = api_error(error)
        if told is None:
            raise
        raise told from error


async def _in_thread(service: Service, start: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    given_up = threading.Event()

    def work() -> None:
        with closing(start()) as items:
            while not given_up.is_set() and (item := next(items, _END)) is not _END:
                loop.call_soon_threadsafe(queue.put_nowait, item)
                service.admission.check_time()

    worker = asyncio.ensure_future(to_thread.run_sync(work, limiter=service.threads))
    worker.add_done_callback(lambda _: queue.put_nowait(_END))
    try:
        while (item := await queue.get()) is not _END:
            yield item
        await worker
    finally:
        given_up.set()
        # Whoever cancels this must still wait: until the thread is done, its place is not free.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([worker])


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await something for as long as the client holds the connection.

    Raises
    ------
    ClientGone
        If it has closed it; the work is cancelled then.
    """
    return await unless(_disconnected(request), work, ClientGone())


async def unless(end: Awaitable[object], work: Awaitable[T], error: Exception) -> T:
    """Await work; once ``end`` comes before it, cancel it and raise an error instead."""
    doing, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise error
        return doing.result()
    finally:
        doing.cancel()
        ending.cancel()
        # Whoever cancels this must still wait: what is iterated over can not be closed while it is asked.
        with anyio.CancelScope(shield=True):
            await asyncio.wait({doing, ending})


def leave(work: Awaitable[object]) -> None:
    """Give up work that has not begun; a coroutine that is never awaited warns otherwise."""
    close = getattr(work, "close", None)
    if close is not None:
        close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
