"""LlamaIndex nodes as documents of an engine."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from kvboost_rag import Document, KVBoostEngine

__all__ = ["add_nodes", "known_ids", "unknown_nodes"]

Nodes = Iterable[BaseNode | NodeWithScore]


def add_nodes(engine: KVBoostEngine, nodes: Nodes, *, show_progress: bool = False) -> list[str]:
    """Turn nodes into KV, in the form in which LlamaIndex puts them into prompts (``MetadataMode.LLM``).

    A node whose KV is stored already costs no forward; one with a known id and another text replaces the old version.

    Parameters
    ----------
    engine
        Of the model that will read them.
    nodes
        As an index or a retriever holds them; nodes without text, as images, are left out.
    show_progress
        Whether to draw a progress bar.

    Returns
    -------
    list[str]
        The ids of the nodes that are now known, in order.
    """
    documents = {document.id: document for document in map(_document, nodes) if document.text.strip()}
    return engine.add_documents(documents.values(), show_progress=show_progress)


def known_ids(engine: KVBoostEngine, nodes: Nodes) -> list[str]:
    """Ids of the nodes that the engine knows, each once, in order."""
    return [i for i in dict.fromkeys(map(_id, nodes)) if engine.get_document(i)]


def unknown_nodes(engine: KVBoostEngine, nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    """Nodes that the engine does not know, in order."""
    return [node for node in nodes if engine.get_document(_id(node)) is None]


def _node(node: BaseNode | NodeWithScore) -> BaseNode:
    return node.node if isinstance(node, NodeWithScore) else node


def _id(node: BaseNode | NodeWithScore) -> str:
    return _node(node).node_id


def _document(node: BaseNode | NodeWithScore) -> Document:
    inner = _node(node)
    return Document(inner.node_id, inner.get_content(MetadataMode.LLM), metadata=dict(inner.metadata))
