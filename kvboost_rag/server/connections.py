"""Connections over which nobody asks anything, or nobody reads."""

from __future__ import annotations

import time
from collections.abc import Iterable

import anyio
from starlette.types import Message, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["IdleConnections", "NobodyReads", "in_time"]


class NobodyReads(Exception):
    """The client takes nothing of its response."""


def in_time(send: Send, seconds: float) -> Send:
    """Give a ``send`` that raises :class:`NobodyReads` where the other one waits for longer than some seconds."""

    async def send_in_time(message: Message) -> None:
        try:
            with anyio.fail_after(seconds):
                await send(message)
        except TimeoutError as error:
            raise NobodyReads from error

    return send_in_time


class IdleConnections:
    """Ends connections over which no request comes, and those that can not be closed because nobody reads.

    uvicorn has a limit for the time between two requests, and only as long as not one byte comes.

    Parameters
    ----------
    seconds
        Without a request.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # By connection, the request that it had last, and the bytes that are still to be sent.
        self._since: dict[tuple[H11Protocol, object, int], float] = {}

    def end(self, connections: Iterable[object]) -> None:
        """Look at all connections there are, and end those that have been idle for too long."""
        now = time.monotonic()
        idle = [_state(c) for c in connections if isinstance(c, H11Protocol) and _is_idle(c)]
        self._since = {state: self._since.get(state, now) for state in idle}
        for (connection, *_), since in self._since.items():
            if now - since > self._seconds:
                connection.transport.abort()


def _state(connection: H11Protocol) -> tuple[H11Protocol, object, int]:
    return connection, connection.cycle, connection.transport.get_write_buffer_size()


def _is_idle(connection: H11Protocol) -> bool:
    is_answering = connection.cycle is not None and not connection.cycle.response_complete
    return not is_answering or connection.transport.is_closing()
