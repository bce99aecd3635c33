"""Chunks in memory under a byte budget."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from kvboost_rag.store.base import ChunkStore, logger, same_tokens
from kvboost_rag.store.ends import DocumentEnds
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.gaps import Gaps
from kvboost_rag.store.holds import Holds
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV, TokenIds
from kvboost_rag.usage import Event, UsageLedger

__all__ = ["MemoryStore"]


class MemoryStore(ChunkStore):
    """Keep chunks in memory, the most valuable ones where not all fit; safe to share between threads.

    Documents are cut from their ends, the least valuable first, until there is room. A chunk that is worth less than
    what would have to go for it is refused, and so is one that stands behind a missing one.

    Parameters
    ----------
    max_bytes
        Budget over :attr:`kvboost_rag.types.ChunkKV.nbytes`, or None for no limit. It holds at every moment.
    eviction
        What a chunk is worth: ``importance``, ``lru``, ``lfu``, or a score.
    usage
        Counts of events, by which chunks are scored; None begins new ones.

    Attributes
    ----------
    evictions
        How many chunks have gone for others.

    Raises
    ------
    ValueError
        If the budget is negative or the eviction not known.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        eviction: str | EvictionScore = "importance",
        usage: UsageLedger | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give a positive number of bytes, or None for no limit")
        self._max_bytes = max_bytes
        self._score = parse_eviction(eviction)
        self._usage = UsageLedger() if usage is None else usage
        self._lock = threading.RLock()
        self._entries: dict[str, ChunkKV] = {}
        self._by_content: dict[str, dict[str, None]] = {}
        self._touched: dict[str, int] = {}
        self._touches = 0
        self._nbytes = 0
        self.evictions = 0
        self._ends = DocumentEnds(self._scored)
        self._gaps = Gaps(self._entries)
        self._pins: Counter[str] = Counter()
        self._holds = Holds()

    def _scored(self, prefix: str) -> tuple[float, int]:
        return self._score.value(self._entries[prefix], self._usage), self._touched[prefix]

    def put(self, entry: ChunkKV) -> bool:
        """Keep a chunk if there is room for it or less valuable ones can make room."""
        chunk, prefix = entry.chunk, entry.chunk.key.prefix
        with self._lock:
            held = self._entries.get(prefix)
            if held is not None and not same_tokens(held, chunk.token_ids):
                self._drop(prefix)
                held = None
            if held is None:
                if not self._make_room(entry):
                    self._gaps.mark(chunk.document_id, chunk.index, prefix)
                    return False
                self._insert(entry)
            self._give_out(prefix)
            self._ends.add(prefix, chunk.document_id, chunk.index)
            return True

    def _insert(self, entry: ChunkKV) -> None:
        key = entry.chunk.key
        self._entries[key.prefix] = entry
        self._by_content.setdefault(key.content, {})[key.prefix] = None
        self._nbytes += entry.nbytes

    def _make_room(self, entry: ChunkKV) -> bool:
        """Evict what a chunk is worth more than; False if that is not enough."""
        chunk, prefix, nbytes = entry.chunk, entry.chunk.key.prefix, entry.nbytes
        if self._max_bytes is None:
            return True
        if nbytes > self._max_bytes:
            logger.warning(
                "a chunk of document %r takes %d bytes, which exceeds the budget of %d; give a larger one",
                chunk.document_id, nbytes, self._max_bytes,
            )  # fmt: skip
            return False
        if chunk.index == 0:
            # Where a document begins anew, perhaps with another text, nothing is missing yet.
            self._gaps.forget(chunk.document_id)
        if self._gaps.is_behind(chunk.document_id, chunk.index):
            logger.debug("chunk %s stands behind one that is not kept", prefix)
            return False
        victims = self._victims(entry, self._nbytes + nbytes - self._max_bytes)
        for victim in victims or ():
            self.evictions += 1
            for document_id, index in self._drop(victim).items():
                # What goes of the document itself is of an earlier version.
                if document_id != chunk.document_id:
                    self._gaps.mark(document_id, index, victim)
        return victims is not None

    def _victims(self, entry: ChunkKV, surplus: int) -> list[str] | None:
        """Choose what goes for a chunk; None, and a log line, if the chunk is worth less or nothing can go."""
        prefix = entry.chunk.key.prefix
        worth = math.inf if prefix in self._pins else self._score.value(entry, self._usage)
        victims: list[str] = []
        with closing(self._ends.lowest(lambda stored: self._must_stay(stored, entry.chunk))) as lowest:
            while surplus > 0:
                victim = next(lowest, None)
                if victim is None:
                    logger.info("chunk %s is not kept: the rest is pinned, in use or its own document", prefix)
                    return None
                if self._scored(victim)[0] > worth:
                    logger.debug("chunk %s is not kept: chunk %s is worth more", prefix, victim)
                    return None
                victims.append(victim)
                surplus -= self._entries[victim].nbytes
        return victims

    def wants(self, prefix: str) -> bool:
        """Whether a chunk of the size of the least valuable one that can go would be kept in its place."""
        with self._lock:
            if self._max_bytes is None or prefix in self._pins:
                return True
            with closing(self._ends.lowest(self._must_stay)) as lowest:
                victim = next(lowest, None)
            if victim is None:
                return self._max_bytes > 0 and not self._entries
            stored = self._entries[victim]
            if self._nbytes + stored.nbytes <= self._max_bytes:
                return True
            offered = replace(stored, chunk=replace(stored.chunk, key=ChunkKey(prefix, stored.chunk.key.content)))
            return self._score.value(offered, self._usage) > self._scored(victim)[0]

    def _must_stay(self, prefix: str, offered: Chunk | None = None) -> bool:
        if prefix in self._pins or self._holds.in_use(prefix):
            return True
        return offered is not None and self._ends.stands_before(prefix, offered.document_id, offered.index)

    def _give_out(self, prefix: str) -> None:
        self._touches += 1
        self._touched[prefix] = self._touches
        self._holds.give_out(prefix)

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key."""
        with self._lock:
            entry = self._entries.get(prefix)
            if entry is None or not same_tokens(entry, token_ids):
                return None
            self._give_out(prefix)
            return entry

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the first chunk with this content key and these tokens."""
        with self._lock:
            entries = (self.get(prefix, token_ids) for prefix in self._by_content.get(content, ()))
            return next((entry for entry in entries if entry is not None), None)

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk, pinned or not."""
        with self._lock:
            if key.prefix in self._entries:
                for document_id in self._drop(key.prefix):
                    self._gaps.forget(document_id)

    def _drop(self, prefix: str) -> dict[str, int]:
        """Take a chunk out; returns its index in each of its documents."""
        entry = self._entries.pop(prefix)
        del self._touched[prefix]
        self._nbytes -= entry.nbytes
        siblings = self._by_content[entry.chunk.key.content]
        del siblings[prefix]
        if not siblings:
            del self._by_content[entry.chunk.key.content]
        return self._ends.remove(prefix)

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Count an event for chunks, stored or not."""
        self._usage.note(prefixes, event)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what is got, found or put while this is open."""
        with self._lock:
            number = self._holds.open()
        try:
            yield
        finally:
            with self._lock:
                self._holds.close(number)

    def pin(self, prefixes: Iterable[str]) -> None:
        """Never evict these chunks until they are unpinned as often."""
        with self._lock:
            self._pins.update(prefixes)

    def unpin(self, prefixes: Iterable[str]) -> None:
        """Take back one pin of each of these chunks."""
        fewer = Counter(prefixes)
        with self._lock:
            if not fewer <= self._pins:
                raise ValueError(f"not pinned: {', '.join(sorted(fewer - self._pins))}; unpin only what was pinned")
            self._pins -= fewer

    def close(self) -> None:
        """Forget everything but the usage."""
        with self._lock:
            for kept in (self._entries, self._by_content, self._touched, self._ends, self._gaps, self._pins):
                kept.clear()
            self._nbytes = 0

    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is stored."""
        return prefix in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys."""
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored chunks."""
        return self._nbytes
