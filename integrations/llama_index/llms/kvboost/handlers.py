"""What LlamaIndex's events tell: which nodes were retrieved, and what was reused for an answer."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.schema import NodeWithScore
from llama_index.llms.kvboost.nodes import add_nodes, known_ids, unknown_nodes
from llama_index_instrumentation import root_dispatcher
from llama_index_instrumentation.events.span import SpanDropEvent

from kvboost_rag import KVBoostEngine, Report

__all__ = ["RetrievalHandler", "collect_reports", "is_tracked", "track_retrievals"]

logger = logging.getLogger("kvboost_rag")

_Spans = tuple[str | None, ...]


class RetrievalHandler(BaseEventHandler):
    """Counts what any retriever returns, for an engine that keeps the KV of often retrieved documents longest.

    Of retrievers inside retrievers (fusion, recursion) only the outermost counts. Nodes that the engine does not know
    are not counted. Attach it to the root dispatcher, or use :func:`track_retrievals`.

    Parameters
    ----------
    engine
        What counts.
    register_nodes
        Whether nodes that the engine does not know are added first, so that the next prompt finds their KV.
    """

    engine: KVBoostEngine
    register_nodes: bool = False
    # Ids of the retrievals that are going on here, the outermost first; each thread and task has its own.
    _open: ContextVar[_Spans] = PrivateAttr(default_factory=lambda: ContextVar[_Spans]("open retrievals", default=()))

    @classmethod
    def class_name(cls) -> str:
        """Name of the class."""
        return "RetrievalHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Count the nodes of the outermost retrieval once it ends."""
        if isinstance(event, RetrievalStartEvent):
            self._open.set((*self._open.get(), event.span_id))
        elif isinstance(event, RetrievalEndEvent):
            if self._close(event.span_id):
                self._count(event.nodes)
        elif isinstance(event, SpanDropEvent):
            # A retriever that raised has no end event.
            self._close(event.span_id)

    def _close(self, span_id: str | None) -> bool:
        """Close a retrieval and all inside it; return whether it was the outermost one."""
        going_on = self._open.get()
        if span_id not in going_on:
            return False
        place = going_on.index(span_id)
        self._open.set(going_on[:place])
        return place == 0

    def _count(self, nodes: list[NodeWithScore]) -> None:
        try:
            if self.register_nodes:
                add_nodes(self.engine, unknown_nodes(self.engine, nodes))
            self.engine.note_retrieved(known_ids(self.engine, nodes))
        except Exception:
            # The dispatcher drops exceptions of handlers without a word.
            logger.exception("retrieved nodes were not counted")
            raise


class _ReportHandler(BaseEventHandler):
    """Collects the reports of answers."""

    _reports: list[Report] = PrivateAttr(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Keep the report of an answer that has one."""
        if isinstance(event, (LLMChatEndEvent, LLMCompletionEndEvent)):
            raw = event.response.raw if event.response is not None else None
            if isinstance(raw, dict) and isinstance(raw.get("report"), Report):
                self._reports.append(raw["report"])


@contextmanager
def track_retrievals(engine: KVBoostEngine, *, register_nodes: bool = False) -> Generator[RetrievalHandler, None, None]:
    """Count what any retriever returns inside a ``with`` block; see :class:`RetrievalHandler`."""
    with _attached(RetrievalHandler(engine=engine, register_nodes=register_nodes)) as handler:
        assert isinstance(handler, RetrievalHandler)
        yield handler


@contextmanager
def collect_reports() -> Iterator[list[Report]]:
    """Collect the reports of all answers that end inside a ``with`` block, of any engine and in any thread.

    A query engine hands on the answer's text alone; this shows what was reused for it.
    """
    handler = _ReportHandler()
    with _attached(handler):
        yield handler._reports


def is_tracked(engine: KVBoostEngine) -> bool:
    """Whether the root dispatcher counts the retrievals of an engine already."""
    return any(isinstance(h, RetrievalHandler) and h.engine is engine for h in root_dispatcher.event_handlers)


@contextmanager
def _attached(handler: BaseEventHandler) -> Iterator[BaseEventHandler]:
    root_dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        # Pydantic models are equal by value: another engine's handler must stay.
        root_dispatcher.event_handlers = [h for h in root_dispatcher.event_handlers if h is not handler]
