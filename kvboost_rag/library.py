"""Documents in, KV out: the index-time half of the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from kvboost_rag.encode import Encoder
from kvboost_rag.prefix import PrefixCache
from kvboost_rag.progress import progress_bar
from kvboost_rag.registry import Registered, Registry
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Chunk, Document

__all__ = ["Library"]

logger = logging.getLogger("kvboost_rag")


class Library:
    """Keeps registry, store and earlier prompts in step.

    Parameters
    ----------
    registry, store, prefixes
        What is kept in step.
    encoder
        Computes KV; None registers documents without any.
    lock
        Held for every change and every forward, never between two batches.
    check_open
        Raises once the engine is closed; asked before each batch.
    """

    def __init__(
        self,
        registry: Registry,
        store: ChunkStore,
        prefixes: PrefixCache,
        encoder: Encoder | None,
        lock: threading.RLock,
        check_open: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._store = store
        self._prefixes = prefixes
        self._encoder = encoder
        self._lock = lock
        self._check_open = check_open
        self._pinned: dict[str, list[str]] = {}

    def add(self, documents: Iterable[Document], *, show_progress: bool | None) -> list[str]:
        """Add documents; see :meth:`kvboost_rag.KVBoostEngine.add_documents`."""
        start, listed = time.perf_counter(), _distinct(documents)
        prepared = {d.id: self._prepared(d) for d in listed}
        old: list[Registered] = []
        added: list[str] = []
        try:
            with progress_bar(len(listed), "indexing", "document", show_progress) as bar:
                for registered in self._added(prepared):
                    old += self._replaced(registered)
                    added.append(registered.document.id)
                    bar.update()
        finally:
            # Only now, because a text may have moved from one id to another.
            self._forget(old)
            self._drop_earlier_versions(added)
            logger.info(
                "%d of %d documents indexed, %d tokens, in %.1f s",
                len(added), len(listed), sum(prepared[i].tokens for i in added), time.perf_counter() - start,
            )  # fmt: skip
        return [d.id for d in listed]

    def _added(self, prepared: Mapping[str, Registered]) -> Iterator[Registered]:
        """Store KV where it is missing; yield each document, under the lock, once all of its KV is there."""
        missing = []
        wanted = {chunk.key.prefix for registered in prepared.values() for chunk in registered.chunks}
        for registered in prepared.values():
            with self._lock:
                self._check_open()
                if self._encoder is None or self._is_stored(registered.chunks):
                    self._make_way(registered, wanted)
                    yield registered
                else:
                    missing.append(registered.chunks)
        entries = self._encoder.encode(missing) if self._encoder else iter(())
        while True:
            with self._lock:
                self._check_open()
                batch = next(entries, None)
                if batch is None:
                    return
                registered = prepared[batch[0].chunk.document_id]
                self._make_way(registered, wanted)
                for entry in batch:
                    self._store.put(entry)
                yield registered

    def _make_way(self, registered: Registered, wanted: Set[str]) -> None:
        """Drop the KV of a document's old text, which may be in the way, and let its pin follow the new one."""
        old = self._registry.get(registered.document.id)
        if old is None or old.text == registered.text:
            return
        # A text may have moved from one id to another.
        self._drop_kv(old, wanted)
        if old.document.id in self._pinned:
            self.unpin([old.document.id])
            self._pin(registered)

    def _drop_kv(self, registered: Registered, wanted: Set[str] = frozenset()) -> None:
        """Delete the chunks that no other document has and nobody wants."""
        for chunk in registered.chunks:
            if chunk.key.prefix not in wanted and self._registry.users(chunk.key.prefix) <= 1:
                self._store.delete(chunk.key)

    def restore(self, document_id: str) -> None:
        """Encode a document again of whose KV something is missing, if the store wants it."""
        with self._lock:
            self._check_open()
            registered = self._registry.get(document_id)
            if self._encoder is None or registered is None:
                return
            missing = [chunk for chunk in registered.chunks if chunk.key.prefix not in self._store]
            if not missing or not self._store.wants(missing[0].key.prefix):
                return
            for entries in self._encoder.encode([registered.chunks]):
                for entry in entries:
                    self._store.put(entry)

    def prefixes(self, document_ids: Iterable[str]) -> list[str]:
        """Return the prefix keys of all chunks of some documents.

        Raises
        ------
        ValueError
            If an id is not known.
        """
        return list(dict.fromkeys(chunk.key.prefix for chunk in self.chunks(document_ids)))

    def chunks(self, document_ids: Iterable[str]) -> list[Chunk]:
        """Return all chunks of some documents; raises as :meth:`prefixes` does."""
        with self._lock:
            return [chunk for registered in self._known(document_ids) for chunk in registered.chunks]

    def _known(self, document_ids: Iterable[str]) -> list[Registered]:
        ids = _ids(document_ids)
        missing = self._registry.missing(ids)
        if missing:
            raise ValueError(f"unknown document ids: {', '.join(map(repr, missing))}; add the documents first")
        return [registered for i in ids if (registered := self._registry.get(i)) is not None]

    def pin(self, document_ids: Iterable[str]) -> None:
        """Keep documents from being evicted; see :meth:`kvboost_rag.KVBoostEngine.pin_documents`."""
        with self._lock:
            for registered in self._known(document_ids):
                if registered.document.id not in self._pinned:
                    self._pin(registered)

    def _pin(self, registered: Registered) -> None:
        prefixes = [chunk.key.prefix for chunk in registered.chunks]
        self._store.pin(prefixes)
        self._pinned[registered.document.id] = prefixes

    def unpin(self, document_ids: Iterable[str]) -> None:
        """Let documents be evicted again."""
        with self._lock:
            for document_id in _ids(document_ids):
                self._store.unpin(self._pinned.pop(document_id, ()))

    def _replaced(self, registered: Registered) -> list[Registered]:
        old = self._registry.get(registered.document.id)
        self._registry.put(registered)
        return [old] if old is not None and old.text != registered.text else []

    def _prepared(self, document: Document) -> Registered:
        text = document.text.strip()
        if not text:
            raise ValueError(f"document {document.id!r} is empty; leave it out or give it text")
        return Registered(document, text, self._encoder.chunks(document) if self._encoder else ())

    def _is_stored(self, chunks: Sequence[Chunk]) -> bool:
        return all(chunk.key.prefix in self._store for chunk in chunks)

    def remove(self, document_ids: Iterable[str]) -> None:
        """Remove documents; see :meth:`kvboost_rag.KVBoostEngine.remove_documents`."""
        ids = _ids(document_ids)
        with self._lock:
            missing = self._registry.missing(ids)
            if missing:
                raise KeyError(f"unknown document ids: {', '.join(map(repr, missing))}")
            # One by one and the registry last, so that an interrupted removal can be done again.
            for registered in self._known(ids):
                self._prefixes.forget_documents([registered.document.id])
                self._drop_kv(registered)
                self.unpin([registered.document.id])
                self._registry.remove(registered.document.id)
                self._forget([registered])

    def _drop_earlier_versions(self, document_ids: Iterable[str]) -> None:
        """Remove what an earlier process left on disk under these ids."""
        with self._lock:
            for document_id in document_ids:
                self._store.drop_document(document_id, self._registry.is_used)

    def _forget(self, gone: Sequence[Registered]) -> None:
        with self._lock:
            self._prefixes.forget_documents([registered.document.id for registered in gone])
            for registered in gone:
                for chunk in self._registry.unused(registered.chunks):
                    self._store.delete(chunk.key)
        self._drop_earlier_versions(registered.document.id for registered in gone)


def _ids(document_ids: Iterable[str]) -> list[str]:
    """Each id once; a lone one is meant as such."""
    return [document_ids] if isinstance(document_ids, str) else list(dict.fromkeys(document_ids))


def _distinct(documents: Iterable[Document]) -> list[Document]:
    listed = list(documents)
    for document in listed:
        if not isinstance(document, Document):
            raise TypeError(f"add_documents takes Document objects, not {type(document).__name__}")
    twice = [i for i, n in Counter(d.id for d in listed).items() if n > 1]
    if twice:
        raise ValueError(f"document ids come twice: {', '.join(map(repr, twice))}; give each document its own")
    return listed
