"""Where a document is cut into chunks."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["AdaptiveChunker", "Chunker"]

# What ends just before a character, in rising order of preference; _NONE where the character goes on.
_NONE, _TOKEN, _WORD, _SENTENCE, _PARAGRAPH = -1, 0, 1, 2, 3
_STOP = re.compile(r"[.!?。！？][\"'”’)\]」』）]*\Z")
_CJK_STOP = re.compile(r"[。！？][。！？\"'”’)\]」』）]*")
_SPACE = re.compile(r"\s+")
# Closing marks that still count after a full stop; a bound keeps the look back constant.
_LOOK_BACK = 4

Offsets = Sequence[tuple[int, int]]
_Levels = npt.NDArray[np.int64]


class Chunker(ABC):
    """Cuts a document into chunks."""

    @abstractmethod
    def boundaries(self, text: str, offsets: Offsets | None, tokens: int | None = None) -> list[int]:
        """Token indexes that end chunks.

        Parameters
        ----------
        text
            The document.
        offsets
            ``(start, end)`` characters of each token, as the tokeniser reports them. Tokens that share a character
            stay together. None if the tokeniser reports none.
        tokens
            Number of tokens; needed only without `offsets`.

        Returns
        -------
        list of int
            Increasing; the last is the number of tokens. Empty if there are no tokens.

        Raises
        ------
        ValueError
            If the offsets do not belong to the text, or the number of tokens is missing or differs.
        """


@dataclass(frozen=True)
class AdaptiveChunker(Chunker):
    """Ends chunks where the text pauses.

    A chunk ends between ``target * (1 - window)`` and ``target * (1 + window)`` tokens after its start, at the best
    place there: after a paragraph, else after a sentence or line, else at a white space, else between any two tokens;
    among equals nearest the target, the earlier of two equally near. White space belongs to the chunk before. A rest of
    at most ``target * (1 + window)`` tokens is one last chunk. A chunk is longer only where a single character is split
    over all the tokens of the window.

    Parameters
    ----------
    target
        Tokens of a chunk, at least 1.
    window
        How far a chunk's size may be from the target, as a part of it: at least 0 and below 1.

    Raises
    ------
    ValueError
        If a parameter is out of its range.
    """

    target: int = 256
    window: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.target < 1:
            raise ValueError(f"target={self.target}: a chunk holds at least 1 token")
        if not 0 <= self.window < 1:
            raise ValueError(f"window={self.window}: choose at least 0 and less than 1")

    def boundaries(self, text: str, offsets: Offsets | None, tokens: int | None = None) -> list[int]:
        """Token indexes that end chunks, see `Chunker.boundaries`."""
        levels = _levels(text, offsets, tokens)
        ends: list[int] = []
        start = 0
        while start < len(levels):
            start = self._end(levels, start)
            ends.append(start)
        return ends

    def _end(self, levels: _Levels, start: int) -> int:
        shortest = max(1, math.ceil(self.target * (1 - self.window)))
        longest = math.floor(self.target * (1 + self.window))
        if len(levels) - start <= longest:
            return len(levels)
        sizes = np.arange(shortest, longest + 1)
        # The level counts before any distance; argmax takes the first, so the earlier, of equals.
        score = levels[start + sizes] * (longest + 1) - abs(sizes - self.target)
        best = start + int(sizes[np.argmax(score)])
        return best if levels[best] > _NONE else _next_character(levels, best)


def _next_character(levels: _Levels, start: int) -> int:
    after = np.flatnonzero(levels[start:] > _NONE)
    return start + int(after[0]) if after.size else len(levels)


def _levels(text: str, offsets: Offsets | None, tokens: int | None) -> _Levels:
    """Level of the boundary before each token, ``[tokens]``."""
    if offsets is None:
        if tokens is None or tokens < 0:
            raise ValueError("without offsets the number of tokens is needed: pass tokens=len(token_ids)")
        return np.full(tokens, _TOKEN)
    if tokens not in (None, len(offsets)):
        raise ValueError(f"{len(offsets)} offsets for {tokens} tokens: pass the offsets of the same tokenisation")
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    if np.any((starts < 0) | (starts > ends) | (ends > len(text))):
        raise ValueError("offsets outside the text: pass the offsets that the tokeniser gave for this very text")
    return np.where(_between_characters(starts, ends), _text_levels(text)[starts], _NONE)


def _between_characters(starts: _Levels, ends: _Levels) -> npt.NDArray[np.bool_]:
    """Whether each token starts a character, ``[tokens]``."""
    before = np.concatenate(([0], np.maximum.accumulate(ends)))[:-1]
    # Some tokenisers give all but the last token of a split character a width of zero.
    empty = starts == ends
    after_empty = np.concatenate(([False], empty))[:-1]
    return np.asarray((starts >= before) & ~empty & ~after_empty)


def _text_levels(text: str) -> _Levels:
    """Level of a cut before each character and at the end, ``[characters + 1]``."""
    levels = np.full(len(text) + 1, _TOKEN)
    for space in _SPACE.finditer(text):
        start, end = space.span()
        ends_sentence = _STOP.search(text[max(0, start - _LOOK_BACK) : start])
        levels[start : end + 1] = _SENTENCE if ends_sentence else _WORD
        for level in (_SENTENCE, _PARAGRAPH):
            start = text.find("\n", start, end) + 1
            if not start:
                break
            levels[start : end + 1] = level
    for stop in _CJK_STOP.finditer(text):
        levels[stop.end()] = _SENTENCE
    return levels
