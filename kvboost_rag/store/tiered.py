"""A fast store in front of a slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvboost_rag.store.base import ChunkStore
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds

__all__ = ["TieredStore"]


class TieredStore(ChunkStore):
    """Write to both stores, read from the fast one first, and move up what was read from the slow one.

    Parameters
    ----------
    fast, slow
        Any two stores; this one closes them.
    """

    def __init__(self, fast: ChunkStore, slow: ChunkStore) -> None:
        self._fast = fast
        self._slow = slow

    def put(self, entry: ChunkKV) -> bool:
        """Keep a chunk in both; True if either holds it."""
        in_fast = self._fast.put(entry)
        return self._slow.put(entry) or in_fast

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key."""
        return self._fast.get(prefix, token_ids) or self._promoted(self._slow.get(prefix, token_ids))

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return any chunk with this content key."""
        return self._fast.find(content, token_ids) or self._promoted(self._slow.find(content, token_ids))

    def _promoted(self, entry: ChunkKV | None) -> ChunkKV | None:
        if entry is not None:
            self._fast.put(entry)
        return entry

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk in both."""
        self._fast.delete(key)
        self._slow.delete(key)

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:
        """Forget a document's unused chunks in both."""
        self._fast.drop_document(document_id, is_used)
        self._slow.drop_document(document_id, is_used)

    def __contains__(self, prefix: object) -> bool:
        """Whether either store holds a chunk with this prefix key."""
        return prefix in self._fast or prefix in self._slow

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys of both."""
        return iter(dict.fromkeys([*self._fast, *self._slow]))

    def __len__(self) -> int:
        """Count the chunks, each once."""
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Bytes of the fast store: the memory that is used."""
        return self._fast.nbytes

    def close(self) -> None:
        """Close both."""
        self._fast.close()
        self._slow.close()
