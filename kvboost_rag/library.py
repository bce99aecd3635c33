"""Documents in, KV out: the index-time half of the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache

from kvboost_rag.errors import ModelChangedError
from kvboost_rag.prefix import PrefixCache
from kvboost_rag.progress import progress_bar
from kvboost_rag.registry import Registered, Registry
from kvboost_rag.spaces import Space
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Chunk, Document

__all__ = ["Library"]

logger = logging.getLogger("kvboost_rag")


class Library:
    """Keeps registry, stores and earlier prompts in step.

    Parameters
    ----------
    registry, prefixes
        What is kept in step with the stores of the spaces.
    spaces
        All key spaces, whose chunks go when their document goes.
    lock
        Held for every change and every forward, never between two batches.
    current
        Key space of the model as it is now, which the registry's keys are of from then on; raises once the engine is
        closed. Asked before and after each batch.
    """

    def __init__(
        self,
        registry: Registry,
        prefixes: PrefixCache,
        spaces: Iterable[Space],
        lock: threading.RLock,
        current: Callable[[], Space],
    ) -> None:
        self._registry = registry
        self._prefixes = prefixes
        self._spaces = spaces
        self._lock = lock
        self._current = current
        self._entered: Space | None = None
        # Prefix keys of pinned documents, by document and space.
        self._pinned: dict[str, dict[Space, list[str]]] = {}

    def add(self, documents: Iterable[Document], *, show_progress: bool | None) -> list[str]:
        """Add documents; see :meth:`kvboost_rag.KVBoostEngine.add_documents`."""
        start, listed = time.perf_counter(), _distinct(documents)
        with self._lock:
            space = self._current()
        prepared = {d.id: _prepared(d, space) for d in listed}
        old: list[Registered] = []
        added: list[str] = []
        try:
            with progress_bar(len(listed), "indexing", "document", show_progress) as bar:
                for registered in self._added(prepared, space):
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

    def _added(self, prepared: Mapping[str, Registered], space: Space) -> Iterator[Registered]:
        """Store KV where it is missing; yield each document, under the lock, once all of its KV is there."""
        missing = []
        wanted = {chunk.key.prefix for registered in prepared.values() for chunk in registered.chunks}
        for registered in prepared.values():
            # Not under the lock: a server that is slow to say so must not hold up requests.
            is_there = space.reuse is None or _is_stored(registered.chunks, space.store)
            with self._lock:
                self._check_still(space)
                if is_there:
                    self._make_way(registered, wanted)
                    yield registered
                else:
                    missing.append(registered.chunks)
        entries = space.reuse.encoder.encode(missing) if space.reuse else iter(())
        while True:
            with self._lock:
                self._check_still(space)
                batch = next(entries, None)
                if batch is None:
                    return
                self._check_still(space)
                registered = prepared[batch[0].chunk.document_id]
                self._make_way(registered, wanted)
                for entry in batch:
                    space.store.put(entry)
                yield registered

    def _check_still(self, space: Space) -> None:
        if self._current() is not space:
            raise ModelChangedError(
                "the model's weights or adapters changed while documents were added; finished ones stay, add all of "
                "them again to do the rest"
            )

    def _make_way(self, registered: Registered, wanted: Set[str]) -> None:
        """Drop the KV of a document's old text, which may be in the way, and let its pin follow the new one."""
        old = self._registry.get(registered.document.id)
        if old is None or old.text == registered.text:
            return
        # A text may have moved from one id to another.
        self._drop_kv(old, wanted)
        if old.document.id in self._pinned:
            self.unpin([old.document.id])
            if self._entered is not None:
                self._pin(registered, self._entered)

    def _drop_kv(self, registered: Registered, wanted: Set[str] = frozenset()) -> None:
        """Delete the chunks that no other document has and nobody wants."""
        prefixes = [chunk.key.prefix for chunk in registered.chunks]
        self._delete(registered.chunks, {p for p in prefixes if p not in wanted and self._registry.users(p) <= 1})

    def _delete(self, chunks: Sequence[Chunk], gone: Set[str]) -> None:
        """Delete those chunks of a document that have these prefix keys now, and what they are in other spaces."""
        for space in self._spaces if gone else ():
            for chunk, own in zip(chunks, space.keyed(chunks), strict=True):
                if chunk.key.prefix in gone:
                    space.store.delete(own.key)

    def restore(self, document_id: str) -> None:
        """Encode a document again of whose KV something is missing, if the store wants it."""
        with self._lock:
            space = self._current()
            registered = self._registry.get(document_id)
        if space.reuse is None or registered is None:
            return
        missing = [chunk for chunk in registered.chunks if chunk.key.prefix not in space.store]
        if not missing or not space.store.wants(missing[0].key.prefix):
            return
        with self._lock:
            self._check_still(space)
            if self._registry.get(document_id) is not registered:
                return
            for entries in space.reuse.encoder.encode([registered.chunks]):
                self._check_still(space)
                for entry in entries:
                    space.store.put(entry)

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
            space = self._current()
            for registered in self._known(document_ids):
                self._pin(registered, space)

    def _pin(self, registered: Registered, space: Space) -> None:
        pinned = self._pinned.setdefault(registered.document.id, {})
        if space not in pinned:
            pinned[space] = [chunk.key.prefix for chunk in registered.chunks]
            space.store.pin(pinned[space])

    def unpin(self, document_ids: Iterable[str]) -> None:
        """Let documents be evicted again."""
        with self._lock:
            for document_id in _ids(document_ids):
                for space, prefixes in self._pinned.pop(document_id, {}).items():
                    space.store.unpin(prefixes)

    def enter(self, space: Space) -> None:
        """Give all documents the keys of another space, and pin there what is pinned."""
        self._entered = space
        self._registry.rekey(space.keyed)
        for registered in self._known(self._pinned):
            self._pin(registered, space)

    def leave_for_good(self, space: Space, memory: ChunkStore) -> None:
        """Forget in memory what belongs to a space that does not come back."""
        for pinned in self._pinned.values():
            space.store.unpin(pinned.pop(space, ()))
        space.store.detach()
        for registered in self._registry:
            for chunk in space.keyed(registered.chunks):
                memory.delete(chunk.key)

    def _replaced(self, registered: Registered) -> list[Registered]:
        old = self._registry.get(registered.document.id)
        self._registry.put(registered)
        return [old] if old is not None and old.text != registered.text else []

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
            ids = list(document_ids)
            for space in self._spaces:
                is_used = self._is_used_in(space)
                for document_id in ids:
                    space.store.drop_document(document_id, is_used)

    def _is_used_in(self, space: Space) -> Callable[[str], bool]:
        if space is self._entered:
            return self._registry.is_used

        @cache
        def used() -> set[str]:
            return {chunk.key.prefix for registered in self._registry for chunk in space.keyed(registered.chunks)}

        return lambda prefix: prefix in used()

    def _forget(self, gone: Sequence[Registered]) -> None:
        with self._lock:
            self._prefixes.forget_documents([registered.document.id for registered in gone])
            for registered in gone:
                # Adding may have been cut short by a change of the space.
                chunks = self._entered.keyed(registered.chunks) if self._entered else registered.chunks
                self._delete(chunks, {chunk.key.prefix for chunk in self._registry.unused(chunks)})
        self._drop_earlier_versions(registered.document.id for registered in gone)


def _prepared(document: Document, space: Space) -> Registered:
    text = document.text.strip()
    if not text:
        raise ValueError(f"document {document.id!r} is empty; leave it out or give it text")
    return Registered(document, text, space.reuse.encoder.chunks(document) if space.reuse else ())


def _is_stored(chunks: Sequence[Chunk], store: ChunkStore) -> bool:
    return all(chunk.key.prefix in store for chunk in chunks)


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
