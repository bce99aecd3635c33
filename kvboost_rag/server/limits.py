"""How much one request and all requests together may ask for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvboost_rag.server.errors import ApiError

__all__ = ["Admission", "Limits"]

_LONGEST_WAIT = 60


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Parameters
    ----------
    max_body_bytes
        Of a request.
    max_tokens
        Of an answer.
    max_prompt_tokens
        Of a prompt; None leaves it to the model's context window.
    max_documents
        That one chat request names or brings.
    max_batch_documents
        That one request adds.
    max_known_documents
        Of one namespace.
    max_concurrent
        Requests that compute at a time.
    max_queue
        Requests that wait behind them; the next one gets status 429.
    timeout
        Seconds that one answer may take once its turn has come; None for no limit.
    drain
        Seconds that running requests are given when the server stops.

    Raises
    ------
    ValueError
        If one can not be used.
    """

    max_body_bytes: int = 8 << 20
    max_tokens: int = 4096
    max_prompt_tokens: int | None = None
    max_documents: int = 64
    max_batch_documents: int = 1024
    max_known_documents: int = 100_000
    max_concurrent: int = 8
    max_queue: int = 64
    timeout: float | None = None
    drain: float = 30.0

    def __post_init__(self) -> None:
        """Check every limit."""
        for name, value in vars(self).items():
            at_least = 0 if name in ("max_queue", "drain") else 1 if isinstance(value, int) else 1e-3
            if value is not None and not at_least <= value < math.inf:
                raise ValueError(f"{name} is {value}; give at least {at_least}")


class Admission:
    """Lets as many requests compute as there are places, and as many wait; in the order in which they came.

    Belongs to one event loop.

    Parameters
    ----------
    limits
        ``max_concurrent`` and ``max_queue``.

    Attributes
    ----------
    active, waiting
        How many requests compute, and how many wait for a place.
    is_draining
        Whether new requests are refused, because the server is about to stop.
    is_over
        Whether those that run are broken off, because it must not wait any longer.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_concurrent)
        self._seconds = 1.0
        self.active = 0
        self.waiting = 0
        self.is_draining = False
        self.is_over = False

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it.

        Raises
        ------
        ApiError
            429 if too many wait already, 503 if the server is about to stop.
        """
        self._check()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.active += 1
        start = time.perf_counter()
        try:
            self.check_time()
            yield
        finally:
            self.active -= 1
            self._free.release()
            # Recent requests count more; an exact mean would need no less guessing.
            self._seconds += 0.2 * (time.perf_counter() - start - self._seconds)

    @property
    def busy(self) -> int:
        """How many requests have been let in and are not done."""
        return self.active + self.waiting

    def check_time(self) -> None:
        """Raise ApiError 503 when the server must not wait any longer; asked in worker threads, too."""
        if self.is_over:
            raise ApiError(503, "the server stops, and the answer was broken off; ask again later", "stopping")

    def _check(self) -> None:
        if self.is_draining:
            raise ApiError(
                503, "the server is about to stop; ask another one, or again later", "stopping",
                headers={"Retry-After": "5", "Connection": "close"},
            )  # fmt: skip
        if self.busy >= self._limits.max_concurrent + self._limits.max_queue:
            seconds = str(self._expected_wait())
            raise ApiError(
                429, f"too many requests are waiting; ask again in {seconds} seconds", "overloaded",
                headers={"Retry-After": seconds},
            )  # fmt: skip

    def _expected_wait(self) -> int:
        wait = self._seconds * (self.waiting + 1) / self._limits.max_concurrent
        return max(1, min(_LONGEST_WAIT, math.ceil(wait)))
