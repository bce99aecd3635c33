"""Find registered documents in a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from sys import getsizeof

from kvboost_rag.locate.index import Hits, Index
from kvboost_rag.locate.shelf import Found
from kvboost_rag.types import Match

__all__ = ["MIN_LENGTH", "Locator"]

MIN_LENGTH = 16
"""Documents with fewer characters, white space around them apart, are never located."""

_WIDTHS = (32, 16)


class Locator:
    """Registered documents, found in any text that holds them.

    White space around a registered text does not count; everything inside must be equal, character by character. A
    document is found whole, or cut at its end if at least `min_cut` of its first characters are there. Documents of
    fewer than `MIN_LENGTH` characters are never found. Whole documents win over cut ones; among each, the leftmost
    wins, then the longest. Of equal texts the one registered first is reported. A cut that several documents share is
    reported as the first of them in the order of their texts.

    A hash of the first characters only says where to look: each match is compared with the text. Registering is cheap;
    the next search sorts what is new. Not safe for concurrent use, since searching sorts and shortens links.

    Parameters
    ----------
    min_cut
        Characters of the shortest cut document that is found, at least 32.

    Raises
    ------
    ValueError
        If `min_cut` is too small.
    """

    def __init__(self, min_cut: int = 64) -> None:
        if min_cut < _WIDTHS[0]:
            raise ValueError(f"min_cut={min_cut}: a cut document is recognised by at least {_WIDTHS[0]} characters")
        self._min_cut = min_cut
        self._texts: dict[int, str] = {}
        self._wide, self._narrow = (Index(width) for width in _WIDTHS)

    def __len__(self) -> int:
        """Count the registered documents."""
        return len(self._texts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the texts themselves."""
        handles = sum(map(getsizeof, self._texts))
        return getsizeof(self._texts) + handles + self._wide.nbytes + self._narrow.nbytes

    def add(self, handle: int, text: str) -> None:
        """Register a document; only a reference to the text is kept.

        Parameters
        ----------
        handle
            Any number that is not in use.
        text
            The document.

        Raises
        ------
        ValueError
            If the handle is in use.
        """
        if handle in self._texts:
            raise ValueError(f"handle {handle} is in use; remove() it first or take another number")
        self._texts[handle] = text
        index = self._index(text.strip())
        if index is not None:
            index.add(handle, text)

    def remove(self, handle: int) -> None:
        """Forget a document.

        Parameters
        ----------
        handle
            As given to `add`.

        Raises
        ------
        ValueError
            If no document has this handle.
        """
        if handle not in self._texts:
            raise ValueError(f"no document has the handle {handle}; add() it first")
        text = self._texts.pop(handle).strip()
        index = self._index(text)
        if index is not None:
            index.remove(handle, text)

    def locate(self, text: str) -> list[Match]:
        """Find the registered documents in a text.

        Parameters
        ----------
        text
            For example a prompt.

        Returns
        -------
        list of Match
            In the order of their places, without overlap.
        """
        wide, narrow = self._wide.search(text), self._narrow.search(text)
        whole = list(_whole(text, [*wide, *narrow]))
        places = _places(wide)
        starts = [0, *(match.end for match in whole)]
        ends = [*(match.start for match in whole), len(text)]
        gaps = zip(starts, ends, strict=True)
        cuts = chain.from_iterable(self._cuts(text[:end], start, wide, places) for start, end in gaps)
        return sorted([*whole, *cuts], key=lambda match: match.start)

    def _index(self, text: str) -> Index | None:
        if len(text) < MIN_LENGTH:
            return None
        return self._wide if len(text) >= _WIDTHS[0] else self._narrow

    def _cuts(self, text: str, start: int, hits: Sequence[Hits], places: Sequence[int]) -> Iterator[Match]:
        """Cut documents in the gap from `start` to the end of the text."""
        for place in places[bisect_left(places, start) : bisect_left(places, len(text) - self._min_cut + 1)]:
            if place < start:
                continue
            found = _best(item.cut(text, place) for item in hits)
            if found is not None and found.length >= self._min_cut:
                start = place + found.length
                yield Match(found.handle, place, start, False)


def _places(hits: Sequence[Hits]) -> list[int]:
    return sorted(set().union(*(item.lows for item in hits)))


def _whole(text: str, hits: Sequence[Hits]) -> Iterator[Match]:
    """Whole documents, the leftmost first, of those the longest."""
    end = 0
    for place in _places(hits):
        if place < end:
            continue
        found = _best(item.whole(text, place) for item in hits)
        if found is not None:
            end = place + found.length
            yield Match(found.handle, place, end, True)


def _best(found: Iterable[Found | None]) -> Found | None:
    """Choose the longest, of those the first in the order of texts, of equal texts the one registered first."""
    return min(filter(None, found), key=lambda item: (-item.length, item.text), default=None)
