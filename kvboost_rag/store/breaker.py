"""What keeps a dead server from costing every request its timeout, and the log from being flooded."""

from __future__ import annotations

import threading
import time

from kvboost_rag.store.base import logger

__all__ = ["Breaker", "FaultLog"]

_LINE_SECONDS = 60.0


class Breaker:
    """A circuit breaker: after failures in a row nothing is tried for a while, then one attempt decides.

    Parameters
    ----------
    failures
        In a row, after which it opens.
    first_pause, longest_pause
        Seconds; each attempt that fails doubles the pause.
    """

    def __init__(self, failures: int = 3, first_pause: float = 1.0, longest_pause: float = 30.0) -> None:
        self._limit = failures
        self._first = first_pause
        self._longest = longest_pause
        self._guard = threading.Lock()
        self._failures = 0
        self._pause = first_pause
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nothing is tried now."""
        with self._guard:
            return self._failures >= self._limit and time.monotonic() < self._until

    def allows(self) -> bool:
        """Whether the caller may try; who may has to tell how it went."""
        with self._guard:
            if self._failures < self._limit:
                return True
            now = time.monotonic()
            if now < self._until:
                return False
            # One tries, the others wait for what comes of it.
            self._until = now + self._pause
            return True

    def failed(self, for_sure: bool = False) -> None:
        """Count a failure; one ``for_sure``, as a refused connection, is enough to open."""
        with self._guard:
            if self._failures >= self._limit:
                self._pause = min(2 * self._pause, self._longest)
            self._failures = self._limit if for_sure else self._failures + 1
            self._until = time.monotonic() + self._pause

    def succeeded(self) -> None:
        """Close it."""
        with self._guard:
            self._failures, self._pause = 0, self._first


class FaultLog:
    """Warnings, one a minute of each kind; the next line of a kind says how many were left out."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Write a line, unless one of its kind was written within the last minute."""
        now = time.monotonic()
        with self._guard:
            if now - self._said.get(kind, -_LINE_SECONDS) < _LINE_SECONDS:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._said[kind] = now
            more = self._left_out.pop(kind, 0)
        since = f" ({more} more of this kind since)" if more else ""
        logger.warning("trouble with the shared tier: %s%s", message, since)
