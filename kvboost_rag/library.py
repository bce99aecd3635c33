"""Documents in, KV out: the index-time half of the engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from tqdm.auto import tqdm

from kvboost_rag.encode import Encoder
from kvboost_rag.prefix import PrefixCache
from kvboost_rag.registry import Registered, Registry
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Chunk, ChunkKV, Document

__all__ = ["Library"]


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
    """

    def __init__(
        self,
        registry: Registry,
        store: ChunkStore,
        prefixes: PrefixCache,
        encoder: Encoder | None,
        lock: threading.RLock,
    ) -> None:
        self._registry = registry
        self._store = store
        self._prefixes = prefixes
        self._encoder = encoder
        self._lock = lock

    def add(self, documents: Iterable[Document], *, show_progress: bool) -> list[str]:
        """Add documents; see :meth:`kvboost_rag.KVBoostEngine.add_documents`."""
        listed = _distinct(documents)
        prepared = {d.id: self._prepared(d) for d in listed}
        missing = {i: r.chunks for i, r in prepared.items() if not self._is_stored(r.chunks)}
        with tqdm(total=len(listed), unit="document", desc="prefill", disable=not show_progress) as bar:
            for document_id in prepared.keys() - missing.keys():
                self._register(prepared[document_id], [])
                bar.update()
            if self._encoder is not None:
                entries = self._encoder.encode(list(missing.values()))
                while (batch := self._compute(entries)) is not None:
                    self._register(prepared[batch[0].chunk.document_id], batch)
                    bar.update()
        return [d.id for d in listed]

    def _prepared(self, document: Document) -> Registered:
        text = document.text.strip()
        if not text:
            raise ValueError(f"document {document.id!r} is empty; leave it out or give it text")
        return Registered(document, text, self._encoder.chunks(document) if self._encoder else ())

    def _is_stored(self, chunks: Sequence[Chunk]) -> bool:
        return all(chunk.key.prefix in self._store for chunk in chunks)

    def _compute(self, entries: Iterable[list[ChunkKV]]) -> list[ChunkKV] | None:
        with self._lock:
            return next(iter(entries), None)

    def _register(self, registered: Registered, entries: Sequence[ChunkKV]) -> None:
        with self._lock:
            old = self._registry.get(registered.document.id)
            for entry in entries:
                self._store.put(entry)
            self._registry.put(registered)
            if old is not None and old.text != registered.text:
                self._forget(old)

    def remove(self, document_ids: Iterable[str]) -> None:
        """Remove documents; see :meth:`kvboost_rag.KVBoostEngine.remove_documents`."""
        ids = [document_ids] if isinstance(document_ids, str) else list(dict.fromkeys(document_ids))
        with self._lock:
            missing = self._registry.missing(ids)
            if missing:
                raise KeyError(f"unknown document ids: {', '.join(map(repr, missing))}")
            for document_id in ids:
                old = self._registry.remove(document_id)
                if old is not None:
                    self._forget(old)

    def _forget(self, registered: Registered) -> None:
        for chunk in self._registry.unused(registered.chunks):
            self._store.delete(chunk.key)
        self._prefixes.forget_documents([registered.document.id])


def _distinct(documents: Iterable[Document]) -> list[Document]:
    listed = list(documents)
    for document in listed:
        if not isinstance(document, Document):
            raise TypeError(f"add_documents takes Document objects, not {type(document).__name__}")
    twice = [i for i, n in Counter(d.id for d in listed).items() if n > 1]
    if twice:
        raise ValueError(f"document ids come twice: {', '.join(map(repr, twice))}; give each document its own")
    return listed
