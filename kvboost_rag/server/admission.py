"""Who computes now, and who waits for a place."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvboost_rag.server.draining import broken_off, refused
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits

__all__ = ["Admission"]

_LONGEST_WAIT = 60


class Admission:
    """Lets as many requests compute as there are places, and others wait.

    Namespaces with waiting requests take turns; the requests of one come in the order in which they were sent. Belongs
    to one event loop.

    Parameters
    ----------
    limits
        How many compute, and how many wait.
    namespaces
        How many share the places.

    Attributes
    ----------
    active, waiting
        How many requests compute, and how many wait for a place.
    is_draining
        Whether new requests are refused, because the server is about to stop.
    is_over
        Whether those that run are broken off, because it must not wait any longer.
    """

    def __init__(self, limits: Limits, namespaces: int = 1) -> None:
        self._limits = limits
        self._share = limits.waiting_share(namespaces)
        # Those that wait, by namespace; the first namespace is next.
        self._queues: defaultdict[str, deque[asyncio.Event]] = defaultdict(deque)
        self._seconds = 1.0
        self.active = 0
        self.waiting = 0
        self.is_draining = False
        self.is_over = False

    @asynccontextmanager
    async def place(self, namespace: str = "") -> AsyncIterator[None]:
        """Wait for a place and hold it.

        Raises
        ------
        ApiError
            429 if too many wait already, 503 if the server is about to stop.
        """
        self._check(namespace)
        if self.active < self._limits.max_concurrent:
            self.active += 1
        else:
            await self._turn(namespace)
        start = time.perf_counter()
        try:
            self.check_time()
            yield
        finally:
            self._leave()
            # Recent requests count more; an exact mean would need no less guessing.
            self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)

    @property
    def busy(self) -> int:
        """How many requests have been let in and are not done."""
        return self.active + self.waiting

    def check_time(self) -> None:
        """Raise ApiError 503 when the server must not wait any longer; asked in worker threads, too."""
        if self.is_over:
            raise broken_off()

    async def _turn(self, namespace: str) -> None:
        """Wait until a place is handed over."""
        turn, queue = asyncio.Event(), self._queues[namespace]
        queue.append(turn)
        self.waiting += 1
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if turn.is_set():
                self._leave()
            else:
                queue.remove(turn)
                self.waiting -= 1
            raise

    def _leave(self) -> None:
        """Hand a place over to the next namespace's first request."""
        namespace = next((name for name, queue in self._queues.items() if queue), None)
        if namespace is None:
            self.active -= 1
            return
        # Moved to the end: its next turn comes after those of all others.
        queue = self._queues[namespace] = self._queues.pop(namespace)
        queue.popleft().set()
        self.waiting -= 1

    def _check(self, namespace: str) -> None:
        if self.is_draining:
            raise refused()
        if self.active < self._limits.max_concurrent:
            return
        if self.waiting >= self._limits.max_queue:
            self._refuse("too many requests are waiting")
        if len(self._queues[namespace]) >= self._share:
            self._refuse("too many requests of this key's namespace are waiting")

    def _refuse(self, why: str) -> None:
        wait = self._seconds * (self.waiting + 1) / self._limits.max_concurrent
        seconds = str(max(1, min(_LONGEST_WAIT, math.ceil(wait))))
        raise ApiError(429, f"{why}; ask again in {seconds} seconds", "overloaded", headers={"Retry-After": seconds})
