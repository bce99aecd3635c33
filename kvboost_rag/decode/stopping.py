"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

__all__ = ["StopMatcher"]


class StopMatcher:
    """Cut a stream of text at the first stop string.

    The stop string that is complete first wins, whatever the borders of the pieces; of several that end together, the
    longest. Text that may still become a stop string is held back, so no part of the winner is ever given out.

    Parameters
    ----------
    stops
        None of them empty; may be an empty tuple.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece.

        Parameters
        ----------
        text
            Any length, also empty. After a hit it is dropped.

        Returns
        -------
        str
            What can be shown; `hit` is the stop string once one was found.
        """
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, certain, self.hit = min(found)
            self._held = ""
        else:
            certain = len(text) - self._open_suffix(text)
            self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Give what was held back: no more text comes."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        lengths = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        return max(lengths, default=0)
