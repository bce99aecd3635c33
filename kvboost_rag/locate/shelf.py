"""Many texts, sorted once, so that those which begin a given text are found without looking at all."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from sys import getsizeof
from typing import Literal, NamedTuple

import numpy as np

from kvboost_rag.locate.hashing import Hashes, anchor_of, anchors_of, filter_of, slots
from kvboost_rag.locate.prefixes import Ancestors, common_length

__all__ = ["Found", "Shelf"]

_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


class Found(NamedTuple):
    """A text of a shelf that begins another text.

    Parameters
    ----------
    length
        Number of characters that agree.
    text
        The stripped text.
    handle
        Its number.
    """

    length: int
    text: str
    handle: int


def _find(links: array[int], row: int) -> int:
    """Follow links to a row that links to itself, and shorten the way for the next time."""
    while links[row] != row:
        links[row] = links[links[row]]
        row = links[row]
    return row


class Shelf:
    """Texts sorted by anchor, the hash of their first characters, and then by themselves.

    Rows never move. A removed row stays, and links lead from it to the next one that is still there: to the left, to
    the right, and up to the longest text that begins the row's own. Among the rows of one anchor, the text that has
    most in common with another is a neighbour of it, and the texts that begin another are those above its neighbour.

    Parameters
    ----------
    handles, texts
        The texts and their numbers, at least one; of equal texts the first is found. White space around a text does not
        count; without it, each has at least `width` characters.
    width
        Characters of the anchor, a power of two.
    """

    def __init__(self, handles: Sequence[int], texts: Sequence[str], width: int) -> None:
        anchors = anchors_of(texts, width)
        order = np.argsort(anchors, kind="stable")
        self._width = width
        self._anchors = anchors[order]
        self._filter = filter_of(anchors)
        runs = _runs(self._anchors)
        for low, high in runs:
            order[low:high] = sorted(order[low:high].tolist(), key=lambda row: texts[row].strip())
        self._handles = [handles[row] for row in order.tolist()]
        # The empty text at the end is the row that stands for "none".
        self._texts: list[str] = [*(texts[row] for row in order.tolist()), ""]
        self._longest = max(len(text.strip()) for text in texts)
        self._ancestors = Ancestors(self._texts, runs)
        self._left, self._right, self._up = (array("i", range(len(self._texts))) for _ in range(3))
        self.removed = 0

    def __len__(self) -> int:
        """Count the rows, removed ones too."""
        return len(self._handles)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the texts and handles themselves."""
        lists = sum(map(getsizeof, (self._handles, self._texts, self._left, self._right, self._up)))
        return lists + self._anchors.nbytes + self._filter.nbytes + self._ancestors.nbytes

    def rows(self) -> tuple[list[int], list[str]]:
        """Return the handles and texts that are not removed, in order."""
        rows = [row for row in range(len(self)) if self._right[row] == row]
        return [self._handles[row] for row in rows], [self._texts[row] for row in rows]

    def remove(self, handle: int, text: str) -> bool:
        """Remove a row; False if it is not here.

        Parameters
        ----------
        handle, text
            As given at the start, the text stripped.
        """
        row = self._row(handle, text)
        if row is None:
            return False
        self._left[row], self._right[row], self._up[row] = self._before(row), row + 1, self._ancestors.parent[row]
        self.removed += 1
        return True

    def search(self, hashes: Hashes) -> tuple[dict[int, int], dict[int, int]]:
        """Find the windows that may begin a text.

        Parameters
        ----------
        hashes
            ``[windows]``, from `hash_windows` with the shelf's width.

        Returns
        -------
        tuple of dict
            The first row that may begin at each window, and the row after the last one that may for each first row.
        """
        windows = np.flatnonzero(self._filter[slots(hashes, self._filter)])
        lows = self._anchors.searchsorted(hashes[windows])
        same = self._anchors[np.minimum(lows, len(self) - 1)] == hashes[windows]
        windows, lows = windows[same], lows[same].tolist()
        highs = self._anchors.searchsorted(hashes[windows], "right").tolist()
        return dict(zip(windows.tolist(), lows, strict=True)), dict(zip(lows, highs, strict=True))

    def whole(self, text: str, start: int, low: int, high: int) -> Found | None:
        """Find the longest row that begins a text.

        Parameters
        ----------
        text, start
            Where to look, and from which character.
        low, high
            The rows to look at, from `search`.
        """
        text = text[start : start + self._longest]
        row = bisect_right(self._texts, text, low, high, key=str.strip) - 1
        if row < low:
            return None
        row = self._ancestors.climb(row, common_length(self._text(row), text))
        found = self._text(_find(self._up, row))
        return self._first(found, low, high) if found else None

    def cut(self, text: str, start: int, low: int, high: int) -> Found | None:
        """Find the row that has most in common with the beginning of a text; of equally good ones the first.

        Parameters
        ----------
        text, start
            Where to look, and from which character.
        low, high
            The rows to look at, from `search`.
        """
        text = text[start : start + self._longest]
        row = bisect_right(self._texts, text, low, high, key=str.strip)
        neighbours = (_find(self._left, self._before(row)), _find(self._right, row))
        near = [common_length(self._text(row), text) for row in neighbours if low <= row < high]
        return self._first(text[: max(near)], low, high) if near else None

    def _first(self, prefix: str, low: int, high: int) -> Found:
        """Find the first row with a prefix that some row has."""
        row = _find(self._right, bisect_left(self._texts, prefix, low, high, key=str.strip))
        return Found(len(prefix), self._text(row), self._handles[row])

    def _row(self, handle: int, text: str) -> int | None:
        anchor = anchor_of(text, self._width)
        low, high = (int(self._anchors.searchsorted(anchor, side)) for side in _SIDES)
        low, high = (bisect(self._texts, text, low, high, key=str.strip) for bisect in (bisect_left, bisect_right))
        try:
            row = self._handles.index(handle, _find(self._right, low), high)
        except ValueError:
            return None
        return row if self._right[row] == row else None

    def _before(self, row: int) -> int:
        return row - 1 if row else len(self)

    def _text(self, row: int) -> str:
        return self._texts[row].strip()


def _runs(anchors: Hashes) -> list[tuple[int, int]]:
    """Ranges of equal anchors, where there is more than one."""
    edges = np.flatnonzero(np.diff(anchors)) + 1
    return [(low, high) for low, high in pairwise([0, *edges.tolist(), len(anchors)]) if high - low > 1]
