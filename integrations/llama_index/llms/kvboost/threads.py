"""A generator's work in threads, so that an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Generator
from typing import Final, TypeVar

__all__ = ["in_threads"]

T = TypeVar("T")


class _End:
    """What stands for the end: StopIteration can not leave a future."""


_END: Final = _End()


async def in_threads(stream: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield a generator's items, each of them computed in a thread.

    Closing or cancelling ends the compute: a step that is running is waited for, none is begun.

    Parameters
    ----------
    stream
        Closed at the end.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    step: asyncio.Future[T | _End] | None = None

    def advance() -> T | _End:
        return next(stream, _END)

    try:
        while True:
            step = loop.run_in_executor(None, context.run, advance)
            # Unlike await, this leaves the step alone when the caller is cancelled.
            await asyncio.wait([step])
            item = step.result()
            if isinstance(item, _End):
                return
            yield item
    finally:
        if step is not None:
            await asyncio.wait([step])
        stream.close()
