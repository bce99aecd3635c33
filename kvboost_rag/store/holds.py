"""Which chunks requests are working with."""

from __future__ import annotations

__all__ = ["Holds"]


class Holds:
    """Keeps, for each chunk that was given out, the holds that were open then; not safe between threads.

    A chunk is in use until the last of these closes; holds that open later do not prolong it, so that requests which
    overlap without end do not keep everything.
    """

    def __init__(self) -> None:
        self._count = 0
        # Numbers in the order of opening: the first is the lowest.
        self._open: dict[int, None] = {}
        self._newest: dict[str, int] = {}

    def open(self) -> int:
        """Begin a hold; returns its number."""
        self._count += 1
        self._open[self._count] = None
        return self._count

    def close(self, number: int) -> None:
        """End a hold."""
        del self._open[number]
        if not self._open:
            self._newest.clear()

    def give_out(self, prefix: str) -> None:
        """Note that a chunk goes to somebody."""
        if self._open:
            self._newest[prefix] = self._count

    def in_use(self, prefix: str) -> bool:
        """Whether a hold is open that was open when a chunk was last given out."""
        return bool(self._open) and self._newest.get(prefix, 0) >= next(iter(self._open))
