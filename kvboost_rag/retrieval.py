"""The smallest retriever that does real retrieval: exact search over normalised embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvboost_rag.embedding import Embedder
from kvboost_rag.types import Document

__all__ = ["FaissRetriever"]


class FaissRetriever:
    """Finds the documents nearest to a question, by cosine similarity.

    Parameters
    ----------
    documents
        What can be found; at least one, ids all different.
    embedder
        Embeds the documents now and every question later.

    Raises
    ------
    ImportError
        faiss is not installed.
    ValueError
        There is no document, or two share an id.
    """

    def __init__(self, documents: Sequence[Document], embedder: Embedder) -> None:
        _check(documents)
        self.documents = tuple(documents)
        self._embedder = embedder
        self._index = _faiss().IndexFlatIP(embedder.dim)
        self._index.add(embedder.embed([document.text for document in self.documents]))

    def retrieve(self, question: str, k: int) -> list[tuple[Document, float]]:
        """Return the ``k`` nearest documents, or all of them if there are fewer.

        Parameters
        ----------
        question
            What to look for.
        k
            How many documents are wanted.

        Returns
        -------
        list[tuple[Document, float]]
            Documents with their cosine similarity to the question, nearest first.

        Raises
        ------
        ValueError
            ``k`` is below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}; ask for at least 1 document")
        # faiss fills up with the id -1 when asked for more than it holds.
        scores, rows = self._index.search(self._embedder.embed([question]), min(k, len(self.documents)))
        return [(self.documents[row], float(score)) for row, score in zip(rows[0], scores[0], strict=True)]


def _check(documents: Sequence[Document]) -> None:
    if not documents:
        raise ValueError("there is nothing to retrieve from; pass at least one document")
    repeated = [name for name, count in Counter(document.id for document in documents).items() if count > 1]
    if repeated:
        raise ValueError(f"document ids must differ, but these repeat: {', '.join(repeated[:5])}")


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("retrieval needs faiss: pip install faiss-cpu") from error
    return faiss
