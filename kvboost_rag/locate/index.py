"""Shelves of texts that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import NamedTuple

from kvboost_rag.locate.hashing import hash_windows
from kvboost_rag.locate.shelf import Found, Shelf

__all__ = ["Hits", "Index"]

# A shelf is merged into a new one up to this many times as large: few shelves to search, few merges.
_GROWTH = 4


class Hits(NamedTuple):
    """Where the texts of a shelf may begin in another text.

    Parameters
    ----------
    shelf
        The shelf.
    lows
        Place in the other text to the first row that may begin there. Plain numbers: a tuple for each place would keep
        the garbage collector busy.
    highs
        First row to the row after the last one.
    """

    shelf: Shelf
    lows: dict[int, int]
    highs: dict[int, int]

    def whole(self, text: str, place: int) -> Found | None:
        """Find the longest text that is whole at a place, see `Shelf.whole`."""
        low = self.lows.get(place)
        return None if low is None else self.shelf.whole(text, place, low, self.highs[low])

    def cut(self, text: str, place: int) -> Found | None:
        """Find the text of which most is at a place, see `Shelf.cut`."""
        low = self.lows.get(place)
        return None if low is None else self.shelf.cut(text, place, low, self.highs[low])


class Index:
    """Shelves of falling size, the oldest texts first.

    Parameters
    ----------
    width
        Characters of the anchor by which texts are found, a power of two.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._shelves: list[Shelf] = []
        self._recent: dict[int, str] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the texts and handles themselves."""
        return getsizeof(self._recent) + sum(shelf.nbytes for shelf in self._shelves)

    def add(self, handle: int, text: str) -> None:
        """Add a text; it is sorted at the next search.

        Parameters
        ----------
        handle
            A number that is not in use.
        text
            At least as many characters as the anchor is wide, white space around them apart.
        """
        self._recent[handle] = text

    def remove(self, handle: int, text: str) -> None:
        """Remove a text; its row goes once more than half of its shelf is removed.

        Parameters
        ----------
        handle, text
            As given to `add`, the text stripped.
        """
        if self._recent.pop(handle, None) is not None:
            return
        place = next((i for i, shelf in enumerate(self._shelves) if shelf.remove(handle, text)), None)
        if place is None:
            return
        shelf = self._shelves[place]
        if 2 * shelf.removed > len(shelf):
            smaller = self._shelve(*shelf.rows())
            self._shelves = [*self._shelves[:place], *smaller, *self._shelves[place + 1 :]]

    def search(self, text: str) -> list[Hits]:
        """Find where in a text which rows may begin.

        Parameters
        ----------
        text
            The text to search.

        Returns
        -------
        list of Hits
            One for each shelf, the oldest first.
        """
        self._settle()
        hashes = hash_windows(text, self._width)
        return [Hits(shelf, *shelf.search(hashes)) for shelf in self._shelves]

    def _settle(self) -> None:
        """Sort what is new, together with the shelves that are not much larger."""
        if not self._recent:
            return
        handles, texts = list(self._recent), list(self._recent.values())
        kept = list(self._shelves)
        while kept and len(kept[-1]) <= _GROWTH * len(handles):
            older = kept.pop().rows()
            handles, texts = older[0] + handles, older[1] + texts
        # Sorting takes long and may be interrupted: nothing is given up before it is done.
        self._shelves, self._recent = kept + self._shelve(handles, texts), {}

    def _shelve(self, handles: Sequence[int], texts: Sequence[str]) -> list[Shelf]:
        return [Shelf(handles, texts, self._width)] if handles else []
