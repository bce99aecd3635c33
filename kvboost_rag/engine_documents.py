"""The documents of an engine: the half of the façade that has to do with no prompt."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvboost_rag.library import Library
from kvboost_rag.refill import Refill
from kvboost_rag.registry import Registry
from kvboost_rag.report import Located
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Document
from kvboost_rag.usage import Event, Usage, UsageLedger

__all__ = ["DocumentMethods"]


class DocumentMethods(ABC):
    """What :class:`kvboost_rag.KVBoostEngine` offers for its documents."""

    _lock: threading.RLock
    _registry: Registry
    _library: Library
    _store: ChunkStore
    _usage: UsageLedger
    _refill: Refill | None

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineClosedError after close()."""

    def add_documents(self, documents: Iterable[Document], *, show_progress: bool | None = False) -> list[str]:
        """Turn documents into KV.

        A document whose KV is stored already costs no forward. One with a known id and another text replaces the
        old version. When interrupted, documents that were finished stay; adding all of them again does the rest.

        Parameters
        ----------
        documents
            With distinct ids.
        show_progress
            Whether to draw a progress bar; None draws one on a terminal or in a notebook.

        Returns
        -------
        list[str]
            Their ids, in order.

        Raises
        ------
        ValueError
            For an empty document or an id that comes twice; nothing is added then.
        ContextWindowError
            For a document longer than the model's context window; nothing is added then.
        """
        self._check_open()
        return self._library.add(documents, show_progress=show_progress)

    def remove_documents(self, document_ids: Iterable[str]) -> None:
        """Forget documents and their KV, in every tier.

        Raises
        ------
        KeyError
            If an id is not known; nothing is removed then.
        """
        self._check_open()
        self._library.remove(document_ids)

    def note_retrieved(self, document_ids: Iterable[str]) -> None:
        """Count that a retriever returned documents, all of one retrieval; what is retrieved often is kept longer.

        Raises
        ------
        ValueError
            If an id is not known.
        """
        self._check_open()
        self._store.note(self._library.prefixes(document_ids), Event.RETRIEVED)

    def prefetch(self, document_ids: Iterable[str]) -> None:
        """Begin to load documents' KV from ``cache_dir`` into memory, while the prompt is still being made.

        Returns at once. Where a document's KV was evicted from there too, it is encoded again.

        Raises
        ------
        ValueError
            If an id is not known.
        """
        self._check_open()
        chunks = self._library.chunks(document_ids)
        self._store.prefetch([(chunk.key.prefix, chunk.token_ids) for chunk in chunks])
        if self._refill is not None:
            self._refill.ask(dict.fromkeys(c.document_id for c in chunks if c.key.prefix not in self._store))

    def usage(self, document_id: str) -> Usage:
        """Return how often a document was retrieved, used in a prompt, and served from stored KV.

        Raises
        ------
        ValueError
            If the id is not known.
        """
        prefixes = self._library.prefixes([document_id])
        if not prefixes:
            return Usage()
        # Documents may begin alike, and a prompt may hold a document's beginning alone.
        first, last = self._usage.usage(prefixes[0]), self._usage.usage(prefixes[-1])
        return Usage(last.retrieved, first.used, first.served)

    def pin_documents(self, document_ids: Iterable[str]) -> None:
        """Never evict documents' KV, until they are unpinned or removed.

        Raises
        ------
        ValueError
            If an id is not known.
        """
        self._check_open()
        self._library.pin(document_ids)

    def unpin_documents(self, document_ids: Iterable[str]) -> None:
        """Let documents' KV be evicted again; nothing happens to those that are not pinned."""
        self._check_open()
        self._library.unpin(document_ids)

    def flush(self) -> None:
        """Wait until evicted documents that were asked for are encoded again and everything is in ``cache_dir``."""
        self._check_open()
        if self._refill is not None:
            self._refill.wait()
        self._store.flush()

    @property
    def documents(self) -> list[Document]:
        """Every known document, in the order of adding."""
        with self._lock:
            return [registered.document for registered in self._registry]

    def get_document(self, document_id: str) -> Document | None:
        """Return a known document, or None."""
        with self._lock:
            registered = self._registry.get(document_id)
        return registered.document if registered else None

    def locate(self, text: str) -> list[Located]:
        """Find known documents inside a text, whole or cut at their end."""
        self._check_open()
        with self._lock:
            found = self._registry.locate(text)
        return [Located(registered.document, m.start, m.end, m.complete) for registered, m in found]
