"""Chunks in memory under a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvboost_rag.store.base import ChunkStore, logger, same_tokens
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds

__all__ = ["MemoryStore"]


class MemoryStore(ChunkStore):
    """Keep chunks in memory; the least recently used goes first when the budget is reached.

    Parameters
    ----------
    max_bytes
        Budget over keys, values and token ids, or None for no limit. It holds before and after every call.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give a positive number of bytes, or None for no limit")
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, ChunkKV] = OrderedDict()
        self._by_content: dict[str, dict[str, None]] = {}
        self._nbytes = 0

    def put(self, entry: ChunkKV) -> bool:
        """Keep a chunk, evicting the least recently used ones first."""
        self._drop(entry.chunk.key.prefix)
        if self._max_bytes is not None:
            if entry.nbytes > self._max_bytes:
                logger.warning("a chunk of %d bytes exceeds the budget of %d", entry.nbytes, self._max_bytes)
                return False
            while self._nbytes + entry.nbytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
        self._entries[entry.chunk.key.prefix] = entry
        self._by_content.setdefault(entry.chunk.key.content, {})[entry.chunk.key.prefix] = None
        self._nbytes += entry.nbytes
        return True

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key."""
        entry = self._entries.get(prefix)
        if entry is None or not same_tokens(entry, token_ids):
            return None
        self._entries.move_to_end(prefix)
        return entry

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the first chunk with this content key and these tokens."""
        for prefix in self._by_content.get(content, ()):
            entry = self.get(prefix, token_ids)
            if entry is not None:
                return entry
        return None

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        self._drop(key.prefix)

    def _drop(self, prefix: str) -> None:
        entry = self._entries.pop(prefix, None)
        if entry is None:
            return
        self._nbytes -= entry.nbytes
        siblings = self._by_content.get(entry.chunk.key.content, {})
        siblings.pop(prefix, None)
        if not siblings:
            self._by_content.pop(entry.chunk.key.content, None)

    def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._by_content.clear()
        self._nbytes = 0

    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is stored."""
        return prefix in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored chunks."""
        return self._nbytes
