"""One count for all who store, shared between threads and merged between processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kvboost_rag.usage.events import Event, Usage, checked
from kvboost_rag.usage.table import Table

__all__ = ["HALF_LIFE", "UsageLedger"]

HALF_LIFE = 2000.0
"""Requests after which an event counts half. On the traces of :mod:`kvboost_rag.replay` 700 is better by 2 % of the
bound where popularity changes, and worse by 1 % where it does not."""


class UsageLedger:
    """Counts events by a chunk's prefix key; safe to share between threads and stores.

    Age is counted in requests, never read off a clock, so that a clock set back changes nothing, and a cache that
    rested for a week finds its documents as warm as it left them.

    Parameters
    ----------
    half_life
        Requests after which an event counts half in :meth:`frequency`.
    max_keys
        Chunks that are remembered; beyond them the ones with the lowest frequency are forgotten.

    Raises
    ------
    ValueError
        If a number is not positive.

    Notes
    -----
    A ledger kept beside a cache that several processes share: each reads it with :meth:`merge_json` when it starts,
    and from time to time, under a lock of the file, merges the file and :meth:`take_delta` into a fresh ledger and
    writes that. If the write fails, :meth:`return_delta` keeps the events for the next attempt.
    """

    def __init__(self, *, half_life: float = HALF_LIFE, max_keys: int = 100_000) -> None:
        if half_life <= 0 or max_keys <= 0:
            raise ValueError(f"half_life is {half_life} and max_keys {max_keys}; give positive numbers")
        self._half_life = half_life
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._all = self._table()
        self._delta = self._table()

    def _table(self) -> Table:
        return Table(self._half_life, self._max_keys)

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Count an event for chunks.

        Parameters
        ----------
        prefixes
            Prefix keys of the chunks of all documents of one request; noting ``USED`` makes it one request older.
        event
            What happened.
        """
        listed = list(prefixes)
        with self._lock:
            self._all.note(listed, event)
            self._delta.note(listed, event)

    def usage(self, prefix: str) -> Usage:
        """Return the counts of a chunk, zeros if it is not known."""
        with self._lock:
            return self._all.usage(prefix)

    def frequency(self, prefix: str) -> float:
        """Return how often a chunk was retrieved or used, an event of ``half_life`` requests ago counting half."""
        with self._lock:
            return self._all.frequency(prefix)

    def heat(self, prefix: str) -> float:
        """Return log2 of the frequency plus the ledger's age in half-lives; minus infinity for a frequency of 0.

        Chunks compare by it as they do by frequency, and while nothing happens to a chunk it stays as it is, so that
        an order by heat needs no updating as time goes by.
        """
        with self._lock:
            return self._all.heat(prefix)

    def last(self, prefix: str) -> int:
        """Return the number of the request that last used the chunk or was served it; 0 if none did."""
        with self._lock:
            return self._all.last(prefix)

    def __len__(self) -> int:
        """Count the chunks that are known."""
        with self._lock:
            return len(self._all)

    def to_json(self) -> dict[str, Any]:
        """Return everything, for :func:`json.dumps`."""
        with self._lock:
            return self._all.to_json()

    def merge_json(self, data: object) -> None:
        """Add what another ledger counted, as of its :meth:`to_json` or :meth:`take_delta`.

        Its requests make this ledger's events older; its own frequencies are taken as they were written.

        Raises
        ------
        ValueError
            If it is damaged; then nothing was added.
        """
        requests, rows = checked(data)
        with self._lock:
            self._all.add(requests, rows)

    def take_delta(self) -> dict[str, Any]:
        """Return what was noted here since the last call, without what was merged, and begin the next delta."""
        with self._lock:
            taken, self._delta = self._delta, self._table()
        return taken.to_json()

    def return_delta(self, delta: object) -> None:
        """Put a delta that could not be written back, so that the next :meth:`take_delta` returns it, too.

        Raises
        ------
        ValueError
            If it is damaged; then nothing was added.
        """
        requests, rows = checked(delta)
        with self._lock:
            self._delta.add(requests, rows)
