"""Progress bars, on a terminal and in a notebook; one look and one switch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

__all__ = ["progress", "progress_bar"]

T = TypeVar("T")


def progress(items: Sequence[T], what: str, unit: str, show: bool | None) -> Iterable[T]:
    """Go through items behind a bar.

    Parameters
    ----------
    items
        What is worked on, one after the other.
    what, unit
        Words before and behind the count.
    show
        Whether to draw it; None draws it where somebody looks: on a terminal or in a notebook.
    """
    bar: Iterable[T] = tqdm(items, desc=what, unit=unit, disable=not _wanted(show))
    return bar


def progress_bar(total: int, what: str, unit: str, show: bool | None) -> Any:
    """Give a bar that is moved by ``update()``, as a context manager; see :func:`progress`."""
    return tqdm(total=total, desc=what, unit=unit, disable=not _wanted(show))


def _wanted(show: bool | None) -> bool:
    if show is not None:
        return show
    return sys.stderr.isatty() or "ipykernel" in sys.modules
