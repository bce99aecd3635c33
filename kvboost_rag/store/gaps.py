"""Where documents were cut."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["Gaps"]

# Documents that are remembered; the oldest are forgotten, and their chunks taken as they come.
_LIMIT = 100_000


class Gaps:
    """Remembers of each document the first chunk that was refused or evicted: what stands behind it is of no use.

    Parameters
    ----------
    stored
        Prefix keys of the chunks that are stored now.
    """

    def __init__(self, stored: Container[str]) -> None:
        self._stored = stored
        self._first: dict[str, tuple[int, str]] = {}

    def mark(self, document_id: str, index: int, prefix: str) -> None:
        """Note that a chunk of a document is not stored."""
        if self.is_behind(document_id, index):
            return
        self._first[document_id] = (index, prefix)
        if len(self._first) > _LIMIT:
            del self._first[next(iter(self._first))]

    def is_behind(self, document_id: str, index: int) -> bool:
        """Whether a place in a document is behind a missing chunk."""
        first, prefix = self._first.get(document_id, (index, ""))
        return index > first and prefix not in self._stored

    def forget(self, document_id: str) -> None:
        """Take a document as whole, as after a change of it."""
        self._first.pop(document_id, None)

    def clear(self) -> None:
        """Forget all documents."""
        self._first.clear()
