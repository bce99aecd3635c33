"""Answers that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import CancelledError
from contextlib import closing
from threading import Event
from typing import Any

from kvboost_rag import Result

__all__ = ["finished"]


def finished(stream: Generator[Any, None, Result], given_up: Event) -> Result:
    """Run a stream of the engine to its end.

    Parameters
    ----------
    stream
        Closed in any case.
    given_up
        Set by another thread when the answer is no longer wanted; looked at between two tokens, for a thread can not
        be cancelled.

    Raises
    ------
    CancelledError
        If it is set before the end.
    """
    with closing(stream):
        while not given_up.is_set():
            try:
                next(stream)
            except StopIteration as end:
                result: Result = end.value
                return result
    raise CancelledError("the answer is no longer wanted")
