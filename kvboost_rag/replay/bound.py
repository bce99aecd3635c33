"""More than any eviction method can save."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvboost_rag.replay.trace import Request, Trace

__all__ = ["belady"]


def belady(trace: Trace, budget: int) -> float:
    """Share of document tokens saved by keeping what is used again soonest, as if all requests were known.

    Belady's rule (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966) is the optimum for pages of one size. So each token is a page here: a document may be kept in part, to the
    token, from its beginning or not, and one that is asked for need not be kept at all. Keeping a token from one use to
    the next occupies one place and saves one token, so this is interval scheduling on ``budget`` machines, for which
    dropping the intervals that end last whenever there are too many is optimal (Carlisle and Lloyd, "On the k-coloring
    of intervals", Discrete Applied Mathematics 59(3), 1995). Every real store does the same or less: it
    keeps whole chunks, and a request's documents may not go while it runs.

    Parameters
    ----------
    trace
        The requests; only used documents count.
    budget
        Tokens that can be kept between requests.

    Returns
    -------
    float
        0 to 1. Nothing is kept at first, so that the first use of a document saves nothing.
    """
    kept = _Kept()
    saved = total = 0
    for request, next_uses in _with_next_uses(trace):
        for document in request.used:
            total += int(trace.tokens[document])
            saved += kept.take(document)
        for document, next_use in zip(request.used, next_uses, strict=True):
            if next_use is not None:
                kept.put(document, int(trace.tokens[document]), next_use)
        kept.cut(budget)
    return saved / total


def _with_next_uses(trace: Trace) -> Iterator[tuple[Request, list[int | None]]]:
    """Yield each request with the numbers of the requests that next use its documents."""
    following: dict[int, int] = {}
    backwards = []
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        backwards.append((request, [following.get(document) for document in request.used]))
        following.update(dict.fromkeys(request.used, number))
    return reversed(backwards)


class _Kept:
    """Tokens kept of each document, the one that is used last on top of a heap."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._total = 0
        self._heap: list[tuple[int, int]] = []

    def put(self, document: int, tokens: int, next_use: int) -> None:
        self._tokens[document] = tokens
        self._total += tokens
        heapq.heappush(self._heap, (-next_use, document))

    def take(self, document: int) -> int:
        """Take a document out at its next use; returns what is left of it."""
        tokens = self._tokens.pop(document, 0)
        self._total -= tokens
        return tokens

    def cut(self, budget: int) -> None:
        """Drop tokens until the budget holds."""
        while self._total > budget:
            # Documents that were used have the lowest next use, so none of them is on top.
            _, document = self._heap[0]
            dropped = min(self._tokens[document], self._total - budget)
            self._tokens[document] -= dropped
            self._total -= dropped
            if not self._tokens[document]:
                del self._tokens[document]
                heapq.heappop(self._heap)
