"""Counts what retrievers return, through LangChain's callbacks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from kvboost_rag import KVBoostEngine
from langchain_kvboost.documents import find, register

__all__ = ["RetrievalFrequencyHandler", "counts_here", "track_retrievals"]


class RetrievalFrequencyHandler(BaseCallbackHandler):
    """Tells an engine which documents any retriever returned.

    Of retrievers inside others (several queries, compression, parents), the outermost alone counts: what it returns is
    what the chain gets.

    Parameters
    ----------
    engine
        Whose documents are counted.
    register_documents
        Whether documents that the engine has not seen are added to it; otherwise they count as ``unknown``.

    Attributes
    ----------
    retrieved : collections.Counter
        Retrievals by the engine's document id, since the handler was made.
    unknown : int
        Retrievals of documents that the engine does not know.
    """

    raise_error = True

    def __init__(self, engine: KVBoostEngine, *, register_documents: bool = False) -> None:
        self.engine = engine
        self.retrieved: Counter[str] = Counter()
        self.unknown = 0
        self._register = register_documents
        self._lock = threading.Lock()
        # Runs that are a retriever or lie inside one.
        self._inside: set[UUID] = set()

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Note that everything below this run is inside a retriever."""
        with self._lock:
            self._inside.add(run_id)

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Note a chain that a retriever runs."""
        with self._lock:
            if parent_run_id in self._inside:
                self._inside.add(run_id)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Count what the outermost retriever returned."""
        with self._lock:
            self._inside.discard(run_id)
            inner = parent_run_id in self._inside
        if not inner:
            self.count(documents)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run that failed."""
        self._leave(run_id)

    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run that is over."""
        self._leave(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget a run that failed."""
        self._leave(run_id)

    def count(self, documents: Sequence[Document]) -> list[str]:
        """Count one retrieval; return the engine's ids of what it knows."""
        if self._register:
            register(self.engine, documents)
        found = [find(self.engine, document) for document in documents]
        known = list(dict.fromkeys(i for i in found if i is not None))
        self.engine.note_retrieved(known)
        with self._lock:
            self.retrieved.update(known)
            self.unknown += found.count(None)
        return known

    def _leave(self, run_id: UUID) -> None:
        with self._lock:
            self._inside.discard(run_id)


_handler: ContextVar[RetrievalFrequencyHandler | None] = ContextVar("kvboost_retrievals", default=None)
_hooked = threading.Event()


@contextmanager
def track_retrievals(
    engine: KVBoostEngine, *, register_documents: bool = False
) -> Iterator[RetrievalFrequencyHandler]:
    """Count the retrievals of everything that runs inside a ``with`` block, without touching any chain.

    Parameters
    ----------
    engine, register_documents
        Of the handler.

    Yields
    ------
    RetrievalFrequencyHandler
        With its counts.
    """
    if not _hooked.is_set():
        _hooked.set()
        register_configure_hook(_handler, inheritable=True)
    handler = RetrievalFrequencyHandler(engine, register_documents=register_documents)
    token = _handler.set(handler)
    try:
        yield handler
    finally:
        _handler.reset(token)


def counts_here(handlers: Sequence[BaseCallbackHandler], engine: KVBoostEngine) -> bool:
    """Whether one of a run's handlers counts for this engine already."""
    return any(isinstance(h, RetrievalFrequencyHandler) and h.engine is engine for h in handlers)
