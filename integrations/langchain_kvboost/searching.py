"""The half of the vector store that finds documents."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_kvboost.vectors import Matrix, Vectors

__all__ = ["Filter", "SearchableStore", "copied", "refuse"]

Filter = Mapping[str, Any] | Callable[[Document], bool]


class SearchableStore(VectorStore):
    """Finds documents by their embeddings, metadata or ids.

    Parameters
    ----------
    embedding
        Embeds texts and questions.
    vectors
        Numbered embeddings.
    """

    def __init__(self, embedding: Embeddings, vectors: Vectors) -> None:
        self._embedding = embedding
        self._vectors = vectors
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.RLock()

    @property
    def embeddings(self) -> Embeddings:
        """What embeds."""
        return self._embedding

    def __len__(self) -> int:
        """Count the documents."""
        return len(self._documents)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, without those that are not known."""
        with self._lock:
            return [copied(self._documents[self._numbers[i]]) for i in ids if i in self._numbers]

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a question; see `similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the ``k`` documents nearest to a question, with the metric's scores, nearest first.

        Parameters
        ----------
        query
            What to look for.
        k
            How many; all, if there are fewer.
        filter
            Metadata that a document must have, key by key, or a function that tells whether it may be returned. Exact:
            ``k`` documents come back if as many pass.
        **kwargs
            None.
        """
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, filter, **kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to an embedding."""
        found = self.similarity_search_with_score_by_vector(embedding, k, filter, **kwargs)
        return [document for document, _ in found]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the ``k`` documents nearest to an embedding, with scores."""
        refuse(kwargs)
        with self._lock:
            found = self._vectors.search(self._vectors.prepared([embedding]), _checked(k), self._passing(filter))
            return [(copied(self._documents[number]), score) for number, score in found]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return documents that are near a question and unlike each other; see the search by vector."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return documents that are near an embedding and unlike each other.

        Parameters
        ----------
        embedding
            What to look for.
        k
            How many documents.
        fetch_k
            How many of the nearest to choose from.
        lambda_mult
            1 counts nearness alone, 0 difference alone.
        filter
            See `similarity_search_with_score`.
        **kwargs
            None.

        Notes
        -----
        Carbonell and Goldstein, "The use of MMR", SIGIR 1998, with the cosine as likeness.
        """
        refuse(kwargs)
        with self._lock:
            query = self._vectors.prepared([embedding])
            near = self._vectors.search(query, max(_checked(k), fetch_k), self._passing(filter))
            numbers = [number for number, _ in near]
            order = _diverse(query, self._vectors.get(numbers), k, lambda_mult) if numbers else []
            return [copied(self._documents[numbers[i]]) for i in order]

    def _passing(self, wanted: Filter | None) -> Iterable[int] | None:
        if wanted is None:
            return None
        if callable(wanted):
            return [number for number, document in self._documents.items() if wanted(copied(document))]
        items = wanted.items()
        return [n for n, d in self._documents.items() if all(k in d.metadata and d.metadata[k] == v for k, v in items)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Map scores to 0 to 1: cosine linearly, inner products by the logistic function, distances by 1 / (1 + d)."""
        if self._vectors.metric == "cosine":
            return lambda cosine: min(1.0, max(0.0, (1 + cosine) / 2))
        if self._vectors.metric == "ip":
            return lambda product: 0.5 * (1 + math.tanh(product / 2))
        return lambda squared: 1 / (1 + math.sqrt(max(0.0, squared)))


def copied(document: Document, document_id: str | None = None) -> Document:
    """Copy a document, with another id if one is given."""
    return document.model_copy(update={"id": document_id or document.id}, deep=True)


def refuse(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that nothing would look at."""
    if kwargs:
        raise TypeError(f"unknown arguments: {', '.join(kwargs)}; leave them out")


def _diverse(query: Matrix, vectors: Matrix, k: int, lambda_mult: float) -> list[int]:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    near = unit @ (query[0] / max(float(np.linalg.norm(query[0])), 1e-12))
    chosen: list[int] = []
    alike = np.full(len(unit), -np.inf)
    while len(chosen) < min(k, len(unit)):
        scores = lambda_mult * near - ((1 - lambda_mult) * alike if chosen else 0)
        scores[chosen] = -np.inf
        chosen.append(int(scores.argmax()))
        alike = np.maximum(alike, unit @ unit[chosen[-1]])
    return chosen


def _checked(k: int) -> int:
    if k < 1:
        raise ValueError(f"k is {k}; ask for at least 1 document")
    return k
