"""A query engine with everything that reuse needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.kvboost.base import EngineLLM
from llama_index.llms.kvboost.nodes import add_nodes
from llama_index.llms.kvboost.postprocessor import KVBoostPostprocessor
from llama_index.llms.kvboost.synthesizer import KVBoostSynthesizer

__all__ = ["KVBoostQueryEngine"]

logger = logging.getLogger("kvboost_rag")


class KVBoostQueryEngine(RetrieverQueryEngine):
    """A retriever, :class:`KVBoostPostprocessor` and :class:`KVBoostSynthesizer`; made by :meth:`from_index`."""

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        llm: EngineLLM,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        precompute: bool = True,
        show_progress: bool = False,
        streaming: bool = False,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        **retriever_options: Any,
    ) -> KVBoostQueryEngine:
        """Make a query engine over an index.

        Parameters
        ----------
        index
            Any that has a retriever.
        llm
            Answers, and its engine keeps the KV.
        node_postprocessors
            Work before the nodes are registered, prefetched and counted.
        precompute, show_progress
            Whether the KV of all nodes in the index's docstore is computed now, and whether that shows a progress bar.
            Otherwise, and where the nodes are in a vector store alone, each is computed when it is first retrieved.
        streaming, text_qa_template, refine_template
            As for every query engine.
        **retriever_options
            Of ``index.as_retriever``, as ``similarity_top_k``.
        """
        if precompute:
            nodes = list(index.docstore.docs.values())
            if not nodes:
                logger.warning("the index's docstore holds no nodes, so their KV is computed when they are retrieved")
            add_nodes(llm.engine, nodes, show_progress=show_progress)
        synthesizer = KVBoostSynthesizer(
            llm, streaming=streaming, text_qa_template=text_qa_template, refine_template=refine_template
        )
        last = KVBoostPostprocessor(engine=llm.engine)
        return cls(index.as_retriever(**retriever_options), synthesizer, [*node_postprocessors, last])
