"""Two slow stores, one behind the other: a folder, and what machines share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from kvboost_rag.store.base import ChunkStore, logger
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds
from kvboost_rag.usage import Event

__all__ = ["ChainedStore"]

_MOST_COPIES = 8


class ChainedStore(ChunkStore):
    """Read from the first store, then from the second; write to both.

    What only the second one had is copied to the first behind the read, as long as no more than a few chunks wait for
    that. Safe to use from several threads if both stores are.

    Parameters
    ----------
    first, second
        Any two stores; this one closes them.
    """

    def __init__(self, first: ChunkStore, second: ChunkStore) -> None:
        self._first = first
        self._second = second
        self._guard = threading.Lock()
        # Held during every change of the first store by a copy or a removal, so that no removed chunk comes back.
        self._order = threading.Lock()
        self._copies: dict[str, ChunkKV] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvboost-copy")

    def put(self, entry: ChunkKV) -> bool:
        """Offer a chunk to both; True if either keeps it."""
        kept = [store.put(entry) for store in (self._first, self._second)]
        return any(kept)

    def wants(self, prefix: str) -> bool:
        """Whether either store would keep a chunk."""
        return self._first.wants(prefix) or self._second.wants(prefix)

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key."""
        return self._first.get(prefix, token_ids) or self._copied(self._second.get(prefix, token_ids))

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return any chunk with this content key."""
        return self._first.find(content, token_ids) or self._copied(self._second.find(content, token_ids))

    def _copied(self, entry: ChunkKV | None) -> ChunkKV | None:
        """Have what the second store gave copied to the first, soon."""
        if entry is not None:
            with self._guard:
                is_due = entry.chunk.key.prefix not in self._copies and len(self._copies) < _MOST_COPIES
                if is_due:
                    self._copies[entry.chunk.key.prefix] = entry
            if is_due:
                self._hand_over(entry.chunk.key.prefix)
        return entry

    def _hand_over(self, prefix: str) -> None:
        try:
            self._copier.submit(self._copy, prefix)
        except RuntimeError:
            # The interpreter is exiting, or the store is closed; the second store still has it.
            self._taken(prefix)

    def _copy(self, prefix: str) -> None:
        with self._order:
            entry = self._taken(prefix)
            try:
                if entry is not None:
                    self._first.put(entry)
            except Exception:
                # Nobody waits for a worker's result.
                logger.exception("KV of the shared tier was not copied to the folder (chunk %s)", prefix)

    def _taken(self, prefix: str) -> ChunkKV | None:
        with self._guard:
            return self._copies.pop(prefix, None)

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk in both."""
        with self._order:
            self._taken(key.prefix)
            self._first.delete(key)
        self._second.delete(key)

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:
        """Forget a document's unused chunks in both."""
        with self._order:
            with self._guard:
                copies = {p for p, entry in self._copies.items() if entry.chunk.document_id == document_id}
            for prefix in copies:
                if not is_used(prefix):
                    self._taken(prefix)
            self._first.drop_document(document_id, is_used)
        self._second.drop_document(document_id, is_used)

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Tell the first store, which shares its usage with the second one if either counts it."""
        self._first.note(prefixes, event)

    def pin(self, prefixes: Iterable[str]) -> None:
        """Keep chunks from being evicted, in both."""
        prefixes = list(prefixes)
        self._first.pin(prefixes)
        self._second.pin(prefixes)

    def unpin(self, prefixes: Iterable[str]) -> None:
        """Take back a pin, in both."""
        prefixes = list(prefixes)
        self._first.unpin(prefixes)
        self._second.unpin(prefixes)

    def __contains__(self, prefix: object) -> bool:
        """Whether either store holds a chunk with this prefix key."""
        return prefix in self._first or prefix in self._second

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys of both."""
        return iter(dict.fromkeys([*self._first, *self._second]))

    def __len__(self) -> int:
        """Count the chunks, each once."""
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Bytes in both."""
        return self._first.nbytes + self._second.nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files in both."""
        return self._first.disk_bytes + self._second.disk_bytes

    @property
    def shared_hits(self) -> int:
        """Chunks that came from other machines' work, in both."""
        return self._first.shared_hits + self._second.shared_hits

    def flush(self) -> None:
        """Return when everything that was put, and what was read and waits to be copied, is in the first store, too."""
        try:
            self._copier.submit(int).result()
        except RuntimeError:
            logger.debug("the store is closed: nothing is copied any more")
        self._first.flush()
        self._second.flush()

    def close(self) -> None:
        """Finish copying, and close both."""
        self._copier.shutdown()
        self._first.close()
        self._second.close()
