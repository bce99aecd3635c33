"""A fast store in front of a slow one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvboost_rag.store.base import ChunkStore, logger, same_tokens
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds
from kvboost_rag.usage import Event

__all__ = ["TieredStore"]


class TieredStore(ChunkStore):
    """Read from the fast store first, move up what was read from the slow one, write to the slow one behind.

    An entry stays pinned in the fast store until it was written; one that the fast store can not take is written at
    once. What is still to be written is written before :meth:`flush` or :meth:`close` returns, or else before the
    interpreter exits. Safe to use from several threads if both stores are.

    Parameters
    ----------
    fast, slow
        Any two stores; this one closes them.
    """

    def __init__(self, fast: ChunkStore, slow: ChunkStore) -> None:
        self._fast = fast
        self._slow = slow
        # Held for bookkeeping and the fast store, never during a call of the slow one.
        self._guard = threading.RLock()
        # What is being changed in the slow store, by prefix key, and of which document if it is written: no change of
        # a chunk overtakes another one, and none waits for those of other chunks, which may take seconds each.
        self._changing: dict[str, str | None] = {}
        self._changed = threading.Condition(self._guard)
        self._pending: dict[str, ChunkKV] = {}
        self._loading: dict[str, Future[ChunkKV | None]] = {}
        # Workers are joined when the interpreter exits, after all that was handed to them.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvboost-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvboost-prefetch")

    # Writing -----------------------------------------------------------------------------------------------------

    def put(self, entry: ChunkKV) -> bool:
        """Keep a chunk; True if either store holds it, the slow one perhaps only later."""
        prefix = entry.chunk.key.prefix
        with self._guard:
            in_fast = self._fast.put(entry)
            if prefix in self._pending:
                return True
            if in_fast:
                # Nothing is put into the fast store meanwhile, which might evict the entry before it is pinned.
                self._fast.pin([prefix])
                self._pending[prefix] = entry
        if in_fast and _handed(self._writer, self._write_pending, entry) is not None:
            return True
        with self._alone(prefix, entry.chunk.document_id):
            return self._written(entry) or in_fast

    @contextmanager
    def _alone(self, prefix: str, document_id: str | None = None) -> Iterator[None]:
        """Have one chunk of the slow store for a change, after those of it that have begun."""
        with self._changed:
            self._changed.wait_for(lambda: prefix not in self._changing)
            self._changing[prefix] = document_id
        try:
            yield
        finally:
            with self._changed:
                del self._changing[prefix]
                self._changed.notify_all()

    def _write_pending(self, entry: ChunkKV) -> None:
        prefix = entry.chunk.key.prefix
        with self._alone(prefix, entry.chunk.document_id):
            if self._pending.get(prefix) is entry:
                self._written(entry)

    def _written(self, entry: ChunkKV) -> bool:
        try:
            return self._slow.put(entry)
        except Exception:
            # Nobody waits for a worker's result; memory goes on without the slow store.
            logger.exception("KV of document %r was not written behind memory", entry.chunk.document_id)
            return False
        finally:
            self._settle(entry)

    def _settle(self, entry: ChunkKV) -> None:
        prefix = entry.chunk.key.prefix
        with self._guard:
            if self._pending.get(prefix) is entry:
                del self._pending[prefix]
                self._fast.unpin([prefix])

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk in both, also one that is being written or loaded."""
        with self._guard:
            self._cancel(key.prefix)
            self._fast.delete(key)
        with self._alone(key.prefix):
            self._slow.delete(key)

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:
        """Forget a document's unused chunks in both."""
        with self._guard:
            entries = [e for e in self._pending.values() if e.chunk.document_id == document_id]
            for entry in entries:
                if not is_used(entry.chunk.key.prefix):
                    self._cancel(entry.chunk.key.prefix)
            self._fast.drop_document(document_id, is_used)
            # What is written now and must go has to be there first.
            self._changed.wait_for(
                lambda: all(is_used(prefix) for prefix, of in self._changing.items() if of == document_id)
            )
        self._slow.drop_document(document_id, is_used)

    def _cancel(self, prefix: str) -> None:
        self._loading.pop(prefix, None)
        entry = self._pending.get(prefix)
        if entry is not None:
            self._settle(entry)

    # Reading -----------------------------------------------------------------------------------------------------

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key; waits for a load of it that has begun."""
        with self._guard:
            entry = self._fast.get(prefix, token_ids)
            if entry is not None:
                return entry
            begun = self._loading.get(prefix)
            load: Future[ChunkKV | None] = begun or Future()
            self._loading[prefix] = load
        if begun is None:
            return self._loaded(load, prefix, token_ids)
        entry = load.result()
        if entry is None or not same_tokens(entry, token_ids):
            return None
        return self._fast.get(prefix, token_ids) or entry

    def _loaded(self, load: Future[ChunkKV | None], prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        entry = None
        try:
            entry = self._slow.get(prefix, token_ids)
            with self._guard:
                # A chunk that was deleted meanwhile must not come back.
                if entry is not None and self._loading.get(prefix) is load:
                    entry = self._promoted(entry)
            return entry
        finally:
            with self._guard:
                if self._loading.get(prefix) is load:
                    del self._loading[prefix]
            load.set_result(entry)

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return any chunk with this content key."""
        entry = self._fast.find(content, token_ids)
        if entry is None:
            entry = self._slow.find(content, token_ids)
            if entry is not None:
                with self._guard:
                    entry = self._promoted(entry)
        return entry

    def _promoted(self, entry: ChunkKV) -> ChunkKV:
        """Give a chunk to the fast store, and get it from there as any other; or as it is if that can not take it."""
        kept = self._fast.get(entry.chunk.key.prefix, entry.chunk.token_ids) if self._fast.put(entry) else None
        return kept or entry

    def prefetch(self, wanted: Iterable[tuple[str, TokenIds]]) -> None:
        """Begin to move chunks up, by prefix key and tokens."""
        for prefix, token_ids in wanted:
            if prefix not in self._fast:
                _handed(self._reader, self._prefetched, prefix, token_ids)

    def _prefetched(self, prefix: str, token_ids: TokenIds) -> None:
        try:
            if prefix not in self._fast:
                self.get(prefix, token_ids)
        except Exception:
            # Nobody waits for a worker's result; whoever asks for the chunk meets the error itself.
            logger.exception("stored KV could not be loaded ahead (chunk %s); it is read when it is asked for", prefix)

    # Both --------------------------------------------------------------------------------------------------------

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Tell the fast store, which shares its usage with the slow one if either counts it."""
        self._fast.note(prefixes, event)

    def hold(self) -> AbstractContextManager[None]:
        """Keep the entries that are handed out in a block from being evicted from the fast store until its end."""
        return self._fast.hold()

    def pin(self, prefixes: Iterable[str]) -> None:
        """Keep chunks from being evicted, in both."""
        prefixes = list(prefixes)
        self._fast.pin(prefixes)
        self._slow.pin(prefixes)

    def unpin(self, prefixes: Iterable[str]) -> None:
        """Take back a pin, in both."""
        prefixes = list(prefixes)
        self._fast.unpin(prefixes)
        self._slow.unpin(prefixes)

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

    @property
    def disk_bytes(self) -> int:
        """Bytes of files in the slow store."""
        return self._slow.disk_bytes

    @property
    def shared_hits(self) -> int:
        """Chunks that the slow store read from what machines share."""
        return self._slow.shared_hits

    def wants(self, prefix: str) -> bool:
        """Whether either store would keep a chunk."""
        return self._fast.wants(prefix) or self._slow.wants(prefix)

    def flush(self) -> None:
        """Return when every chunk that was put is in the slow store."""
        # One worker writes in order, so that all that was handed over before is written when this is done.
        last = _handed(self._writer, _nothing)
        if last is not None:
            last.result()
        self._fast.flush()
        self._slow.flush()

    def detach(self) -> None:
        """Write what is still to be written, and close the slow store alone."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._slow.close()

    def close(self) -> None:
        """Write what is still to be written, and close both."""
        self.detach()
        self._fast.close()


def _handed(worker: ThreadPoolExecutor, task: Callable[..., None], *arguments: Any) -> Future[None] | None:
    """Give a task to a worker; None if it takes none any more: it was closed, or the interpreter is exiting."""
    try:
        return worker.submit(task, *arguments)
    except RuntimeError:
        return None


def _nothing() -> None:
    pass
