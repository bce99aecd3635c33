"""Which chunks can go without making others useless, the least valuable first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterable

__all__ = ["DocumentEnds"]

_Score = tuple[float, int]


class DocumentEnds:
    """Knows the stored chunks' places in documents, and the order in which documents are cut from their ends.

    A chunk's KV is exact only behind the chunks before it, so a document loses its last chunk first. A chunk may stand
    in several documents that begin alike; it is an end only where it is the last stored one of each.

    Parameters
    ----------
    score
        Value of a stored chunk by prefix key, then when it was touched. Scores may rise, but not sink: the order is
        corrected when a chunk comes up as the lowest.
    """

    def __init__(self, score: Callable[[str], _Score]) -> None:
        self._score = score
        self._documents: dict[str, dict[str, int]] = {}
        self._places: dict[str, dict[str, int]] = {}
        self._heap: list[tuple[_Score, str]] = []
        self._queued: set[str] = set()

    def add(self, prefix: str, document_id: str, index: int) -> None:
        """Place a stored chunk in a document; it may be placed in others already."""
        self._places.setdefault(prefix, {})[document_id] = index
        self._documents.setdefault(document_id, {})[prefix] = index
        self._queue(prefix)

    def remove(self, prefix: str) -> dict[str, int]:
        """Take a chunk away; returns its index in each of its documents."""
        places = self._places.pop(prefix)
        for document_id in places:
            chunks = self._documents[document_id]
            del chunks[prefix]
            if not chunks:
                del self._documents[document_id]
        self._queue_last(places, ())
        return places

    def clear(self) -> None:
        """Take all chunks away."""
        for kept in (self._documents, self._places, self._heap, self._queued):
            kept.clear()

    def stands_before(self, prefix: str, document_id: str, index: int) -> bool:
        """Whether a stored chunk has a lower index in a document; the others in it may be of an earlier version."""
        return self._places[prefix].get(document_id, index) < index

    def lowest(self, keep: Callable[[str], bool]) -> Generator[str, None, None]:
        """Iterate over the chunks in the order in which they would go, each as if those before it were gone.

        Nothing may be added or removed while this is open.

        Parameters
        ----------
        keep
            Chunks that must stay, and with them all chunks before them.
        """
        gone: set[str] = set()
        seen: list[str] = []
        try:
            while self._heap:
                score, prefix = heapq.heappop(self._heap)
                self._queued.discard(prefix)
                if prefix not in self._places or not self._is_end(prefix, gone):
                    continue
                if score != self._score(prefix):
                    self._queue(prefix)
                    continue
                seen.append(prefix)
                if not keep(prefix):
                    yield prefix
                    gone.add(prefix)
                    self._queue_last(self._places[prefix], gone)
        finally:
            for prefix in seen:
                self._queue(prefix)

    def _is_end(self, prefix: str, gone: Collection[str]) -> bool:
        """Whether all chunks behind one are gone."""
        return all(
            other in gone or behind <= index
            for document_id, index in self._places[prefix].items()
            for other, behind in self._documents[document_id].items()
        )

    def _queue_last(self, document_ids: Iterable[str], gone: Collection[str]) -> None:
        """Queue the last chunks of documents; whether others keep them is seen when they come up."""
        for document_id in document_ids:
            left = {p: index for p, index in self._documents.get(document_id, {}).items() if p not in gone}
            last = max(left.values(), default=0)
            for prefix, index in left.items():
                if index == last:
                    self._queue(prefix)

    def _queue(self, prefix: str) -> None:
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = [item for item in self._heap if item[1] in self._places]
            heapq.heapify(self._heap)
            self._queued = {prefix for _, prefix in self._heap}
        if prefix not in self._queued:
            self._queued.add(prefix)
            heapq.heappush(self._heap, (self._score(prefix), prefix))
