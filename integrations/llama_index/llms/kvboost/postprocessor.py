"""The last step before the prompt: the final nodes are known, loaded and counted."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.kvboost.handlers import is_tracked
from llama_index.llms.kvboost.nodes import add_nodes, known_ids, unknown_nodes

from kvboost_rag import KVBoostEngine

__all__ = ["KVBoostPostprocessor"]


class KVBoostPostprocessor(BaseNodePostprocessor):
    """Prepares an engine for the nodes that go into the prompt; the nodes pass through unchanged.

    Put it last: what rerankers drop is not looked at.

    Parameters
    ----------
    engine
        The LLM's.
    register_nodes
        Whether nodes that the engine does not know are added. Their KV is computed now, and reused from now on. A node
        whose id is known keeps the text it was added with; :func:`add_nodes` replaces it. None is added to an engine
        that is ``trusted_only``.
    count
        Whether each node is noted as retrieved; left out where a :class:`RetrievalHandler` counts for this engine.
    """

    engine: KVBoostEngine = Field(exclude=True)
    register_nodes: bool = True
    count: bool = True

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in serialised form."""
        return "KVBoostPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self.register_nodes and not self.engine.trusted_only:
            add_nodes(self.engine, unknown_nodes(self.engine, nodes))
        known = known_ids(self.engine, nodes)
        self.engine.prefetch(known)
        if self.count and not is_tracked(self.engine):
            self.engine.note_retrieved(known)
        return nodes
