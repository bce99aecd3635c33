"""Events counted by chunk, older ones less."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvboost_rag.usage.events import FORMAT, Event, Row, Usage

__all__ = ["Table"]

_PLACES = {event: place for place, event in enumerate(Event)}
# A use adds less than the retrieval it mostly comes with: the same popularity, seen in fewer documents. What is served
# is used as well; counting it again would favour what is stored already.
_WEIGHTS = {Event.RETRIEVED: 1.0, Event.USED: 0.5, Event.SERVED: 0.0}
# Looking for the coldest at every new key would cost more than the keys are worth.
_DROPPED_AT_ONCE = 0.1


class _Record:
    """A chunk's counts by place, its frequency as of ``at``, and when it was last used, both in requests."""

    __slots__ = ("at", "counts", "frequency", "last")

    def __init__(self) -> None:
        self.counts = [0] * len(Event)
        self.frequency = 0.0
        self.at = 0
        self.last = 0


class Table:
    """Records by prefix key, and the number of requests they were counted over; not safe between threads.

    Parameters
    ----------
    half_life, max_keys
        See :class:`kvboost_rag.usage.UsageLedger`.
    """

    def __init__(self, half_life: float, max_keys: int) -> None:
        self._half_life = half_life
        self._max_keys = max_keys
        self._requests = 0
        self._records: dict[str, _Record] = {}

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Count an event; a use makes the table one request older."""
        self._requests += event is Event.USED
        place, weight = _PLACES[event], _WEIGHTS[event]
        for prefix in prefixes:
            record = self._record(prefix)
            record.counts[place] += 1
            if weight:
                self._add(record, weight)
            if event is not Event.RETRIEVED:
                record.last = self._requests
        self._bound()

    def add(self, requests: int, rows: Mapping[str, Row]) -> None:
        """Add what was counted elsewhere over some requests."""
        self._requests += requests
        for prefix, row in rows.items():
            record = self._record(prefix)
            record.counts = [mine + other for mine, other in zip(record.counts, row.counts, strict=True)]
            self._add(record, row.frequency)
            if row.counts[_PLACES[Event.USED]] or row.counts[_PLACES[Event.SERVED]]:
                record.last = max(record.last, self._requests - row.age)
        self._bound()

    def _record(self, prefix: str) -> _Record:
        record = self._records.get(prefix)
        if record is None:
            record = self._records[prefix] = _Record()
        return record

    def _add(self, record: _Record, weight: float) -> None:
        record.frequency = self._now(record) + weight
        record.at = self._requests

    def _now(self, record: _Record) -> float:
        age = self._requests - record.at
        return float(record.frequency * 0.5 ** (age / self._half_life)) if age else record.frequency

    def _bound(self) -> None:
        surplus = len(self._records) - self._max_keys
        if surplus > 0:
            surplus += int(self._max_keys * _DROPPED_AT_ONCE)
            coldest = heapq.nsmallest(surplus, self._records, key=lambda prefix: self._now(self._records[prefix]))
            for prefix in coldest:
                del self._records[prefix]

    def usage(self, prefix: str) -> Usage:
        """Return the counts of a chunk."""
        record = self._records.get(prefix)
        return Usage(*record.counts) if record else Usage()

    def frequency(self, prefix: str) -> float:
        """Return the decayed count of a chunk."""
        record = self._records.get(prefix)
        return self._now(record) if record else 0.0

    def heat(self, prefix: str) -> float:
        """Return the frequency on the scale of :meth:`kvboost_rag.usage.UsageLedger.heat`."""
        record = self._records.get(prefix)
        if record is None or not record.frequency:
            return -math.inf
        return math.log2(record.frequency) + record.at / self._half_life

    def last(self, prefix: str) -> int:
        """Return the number of the request that last used a chunk."""
        record = self._records.get(prefix)
        return record.last if record else 0

    def to_json(self) -> dict[str, Any]:
        """Return everything, for :func:`kvboost_rag.usage.events.checked`."""
        rows = {
            prefix: [*record.counts, self._now(record), self._requests - record.last]
            for prefix, record in self._records.items()
        }
        return {"format": FORMAT, "requests": self._requests, "chunks": rows}

    def __len__(self) -> int:
        """Count the records."""
        return len(self._records)
