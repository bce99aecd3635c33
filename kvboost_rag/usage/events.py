"""What can happen to a chunk, and how that is counted and written down."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

__all__ = ["FORMAT", "Event", "Row", "Usage", "checked"]

FORMAT = 1

_KEY = re.compile(r"[0-9a-f]{32}")
_LIMIT = 1 << 63


class Event(str, Enum):
    """What can happen to a document's chunk."""

    RETRIEVED = "retrieved"
    """A retriever returned the document, whether or not it went into a prompt."""
    USED = "used"
    """The document stood in a prompt. Each note of it counts as one request: the ledger's clock."""
    SERVED = "served"
    """Its KV came out of a store."""


@dataclass(frozen=True)
class Usage:
    """Events of one chunk, counted.

    Parameters
    ----------
    retrieved, used, served
        How often, see :class:`Event`.
    """

    retrieved: int = 0
    used: int = 0
    served: int = 0


@dataclass(frozen=True)
class Row:
    """A chunk as written: counts in the order of the events, frequency, and requests since it was last used."""

    counts: tuple[int, ...]
    frequency: float
    age: int


def checked(data: object) -> tuple[int, dict[str, Row]]:
    """Read what a ledger wrote: requests, and the rows by prefix key.

    Raises
    ------
    ValueError
        If it is damaged, saying where.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("this is no usage ledger of this version; delete it, counting begins anew")
    requests, rows = data.get("requests"), data.get("chunks")
    if not _is_count(requests) or not isinstance(rows, dict):
        raise ValueError("the usage ledger is damaged; delete it, counting begins anew")
    return requests, {prefix: _row(prefix, row) for prefix, row in rows.items()}


def _row(prefix: object, row: object) -> Row:
    if isinstance(prefix, str) and _KEY.fullmatch(prefix) and isinstance(row, list) and len(row) == len(Event) + 2:
        *counts, frequency, age = row
        is_frequency = type(frequency) in (int, float) and 0 <= frequency < _LIMIT
        if is_frequency and all(map(_is_count, (*counts, age))):
            return Row(tuple(counts), float(frequency), age)
    raise ValueError(f"the usage ledger is damaged at chunk {prefix!r}; delete it, counting begins anew")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LIMIT
