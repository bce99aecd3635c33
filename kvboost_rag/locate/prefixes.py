"""What texts have in common at their beginning."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from sys import getsizeof

__all__ = ["Ancestors", "common_length"]


def common_length(first: str, second: str) -> int:
    """Length of the longest common prefix, by comparing whole slices."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Ancestors:
    """Links from each text up to the longest one that begins it.

    Parameters
    ----------
    texts
        Ordered inside each run once white space around them is taken off. The last is the empty text, which stands for
        "none": it begins every text.
    runs
        Ranges of rows in which one text may begin another.
    """

    def __init__(self, texts: Sequence[str], runs: Iterable[tuple[int, int]]) -> None:
        none = len(texts) - 1
        self._texts = texts
        self.parent = array("i", [none]) * len(texts)
        self._jump = self.parent[:]
        depth = array("i", [1]) * none + array("i", [0])
        for low, high in runs:
            for row in range(low + 1, high):
                self._link(row, depth)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the texts."""
        return getsizeof(self.parent) + getsizeof(self._jump)

    def climb(self, row: int, length: int) -> int:
        """Find the longest text of at most `length` characters among a text and those above it.

        Parameters
        ----------
        row
            The text.
        length
            Characters, white space around the texts apart.

        Returns
        -------
        int
            Its row, after a number of steps that is logarithmic in the number of texts above.
        """
        while self._length(row) > length:
            jump = self._jump[row]
            row = jump if self._length(jump) > length else self.parent[row]
        return row

    def _length(self, row: int) -> int:
        return len(self._texts[row].strip())

    def _link(self, row: int, depth: array[int]) -> None:
        # The second link follows Myers (1983), "An applicative random-access stack".
        parent, text = row - 1, self._texts[row].strip()
        while not text.startswith(self._texts[parent].strip()):
            parent = self.parent[parent]
        jump = self._jump[parent]
        even = depth[parent] - depth[jump] == depth[jump] - depth[self._jump[jump]]
        self.parent[row], self._jump[row] = parent, self._jump[jump] if even else parent
        depth[row] = depth[parent] + 1
