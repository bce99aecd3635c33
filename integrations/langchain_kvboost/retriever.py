"""A retriever around any other."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from pydantic import ConfigDict

from kvboost_rag import KVBoostEngine
from langchain_kvboost.counting import RetrievalFrequencyHandler, counts_here
from langchain_kvboost.documents import find, register

__all__ = ["KVBoostRetriever"]


class KVBoostRetriever(BaseRetriever):
    """Retrieves as another retriever does, and has the KV of what it returns ready.

    Wrap the outermost retriever of a chain: its documents are those that the prompt will hold.

    Parameters
    ----------
    retriever
        Any retriever.
    engine
        Of the model that will answer.
    register_documents
        Whether the KV of documents that the engine has not seen is computed; the first retrieval takes that long.
        Never for an engine that is ``trusted_only``.
    prefetch
        Whether stored KV starts on its way into memory at once.
    count
        Whether the retrieval is counted, unless a :class:`RetrievalFrequencyHandler` counts it already.
    k
        Most documents to return; None for all. A call may name its own.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: BaseRetriever
    engine: KVBoostEngine
    register_documents: bool = True
    prefetch: bool = True
    count: bool = True
    k: int | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()})
        return self._prepared(found, k, counts_here(run_manager.handlers, self.engine))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()})
        counted = counts_here(run_manager.handlers, self.engine)
        return await run_in_executor(None, self._prepared, found, k, counted)

    def _prepared(self, found: list[Document], k: int | None, counted: bool) -> list[Document]:
        limit = self.k if k is None else k
        if limit is not None and limit < 1:
            raise ValueError(f"k is {limit}; ask for at least 1 document")
        documents = found[:limit]
        ids = self._known(documents)
        if self.count and not counted:
            RetrievalFrequencyHandler(self.engine).count(documents)
        if self.prefetch and ids:
            self.engine.prefetch(ids)
        return documents

    def _known(self, documents: list[Document]) -> list[str]:
        if self.register_documents and not self.engine.trusted_only:
            return list(dict.fromkeys(register(self.engine, documents)))
        found: list[Any] = [find(self.engine, document) for document in documents]
        return list(dict.fromkeys(i for i in found if i is not None))
