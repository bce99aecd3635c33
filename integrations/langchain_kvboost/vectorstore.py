"""A vector store on faiss that computes KV while it indexes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from kvboost_rag import KVBoostEngine
from langchain_kvboost.documents import to_engine
from langchain_kvboost.persistence import Saved, Shape, load, save
from langchain_kvboost.vectors import Matrix, Metric, Vectors

__all__ = ["Filter", "KVBoostVectorStore"]

Filter = Mapping[str, Any] | Callable[[Document], bool]


class KVBoostVectorStore(VectorStore):
    """Documents found by the likeness of their embeddings, with their KV ready for the prompt.

    Parameters
    ----------
    embedding
        Embeds texts and questions.
    engine
        Of the model that will answer; None for retrieval alone.
    precompute
        Whether the engine gets to know documents while they are indexed, and forgets them when they are deleted.
    metric
        ``"cosine"``, ``"ip"`` (inner product) or ``"l2"``; scores are the cosine, the inner product, or the squared
        Euclidean distance, of which smaller is nearer.
    index_factory
        As faiss writes it: ``"Flat"`` (exact), ``"HNSW32"``, ``"IVF64,Flat"``. What needs training is trained by the
        first call that adds texts.

    Notes
    -----
    A document without an id gets one from its text and metadata, so adding it again changes nothing. Documents go in
    and come out as copies.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        engine: KVBoostEngine | None = None,
        precompute: bool = True,
        metric: Metric = "cosine",
        index_factory: str = "Flat",
    ) -> None:
        self._embedding = embedding
        self._engine = engine if precompute else None
        self._vectors = Vectors(metric, index_factory)
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._lock = threading.RLock()

    @property
    def embeddings(self) -> Embeddings:
        """What embeds."""
        return self._embedding

    def __len__(self) -> int:
        """Count the documents."""
        return len(self._documents)

    # Changes ---------------------------------------------------------------------------------------------------------

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents; one with a known id replaces the old one.

        Parameters
        ----------
        documents
            Not changed.
        **kwargs
            ``ids``: of the documents, instead of their own.

        Returns
        -------
        list[str]
            Their ids.

        Raises
        ------
        ValueError
            If there are more or fewer ids than documents. Nothing is added then, nor after any other error.
        """
        ids = kwargs.pop("ids", None)
        _refuse(kwargs)
        given = [document.id for document in documents] if ids is None else list(ids)
        if len(given) != len(documents):
            raise ValueError(f"there are {len(given)} ids for {len(documents)} documents; give one for each")
        named = [_copy(d, i or _stable_id(d)) for d, i in zip(documents, given, strict=True)]
        latest = list({str(document.id): document for document in named}.values())
        if latest:
            vectors = self._vectors.prepared(self._embedding.embed_documents([d.page_content for d in latest]))
            # Before any KV is computed for texts that could not be indexed.
            self._vectors.make_ready(vectors)
            self._precompute(latest)
            self._replace(latest, vectors)
        return [str(document.id) for document in named]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents and their KV; ids that are not known are passed over, None deletes everything."""
        _refuse(kwargs)
        with self._lock:
            gone = [i for i in (list(self._numbers) if ids is None else ids) if i in self._numbers]
            numbers = [self._numbers.pop(i) for i in dict.fromkeys(gone)]
            self._vectors.remove(numbers)
            for number in numbers:
                del self._documents[number]
        if self._engine is not None:
            self._engine.remove_documents([i for i in dict.fromkeys(gone) if self._engine.get_document(i) is not None])
        return True

    def _precompute(self, documents: Sequence[Document]) -> None:
        if self._engine is not None:
            self._engine.add_documents(to_engine(d) for d in documents if d.page_content.strip())

    def _replace(self, documents: Sequence[Document], vectors: Matrix) -> None:
        with self._lock:
            numbers = list(range(self._next, self._next + len(documents)))
            self._vectors.add(numbers, vectors)
            self._next += len(documents)
            old = [self._numbers[str(d.id)] for d in documents if d.id in self._numbers]
            self._vectors.remove(old)
            for number in old:
                del self._documents[number]
            self._documents.update(zip(numbers, documents, strict=True))
            self._numbers.update((str(d.id), number) for number, d in zip(numbers, documents, strict=True))

    # Searches --------------------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, without those that are not known."""
        with self._lock:
            return [_copy(self._documents[self._numbers[i]]) for i in ids if i in self._numbers]

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
        _refuse(kwargs)
        with self._lock:
            found = self._vectors.search(self._vectors.prepared([embedding]), _checked(k), self._passing(filter))
            return [(_copy(self._documents[number]), score) for number, score in found]

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
        _refuse(kwargs)
        with self._lock:
            query = self._vectors.prepared([embedding])
            near = self._vectors.search(query, max(_checked(k), fetch_k), self._passing(filter))
            numbers = [number for number, _ in near]
            order = _diverse(query, self._vectors.get(numbers), k, lambda_mult) if numbers else []
            return [_copy(self._documents[numbers[i]]) for i in order]

    def _passing(self, wanted: Filter | None) -> Iterable[int] | None:
        if wanted is None:
            return None
        if callable(wanted):
            return [number for number, document in self._documents.items() if wanted(_copy(document))]
        items = wanted.items()
        return [n for n, d in self._documents.items() if all(k in d.metadata and d.metadata[k] == v for k, v in items)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Map scores to 0 to 1: cosine linearly, inner products by the logistic function, distances by 1 / (1 + d)."""
        if self._vectors.metric == "cosine":
            return lambda cosine: min(1.0, max(0.0, (1 + cosine) / 2))
        if self._vectors.metric == "ip":
            return lambda product: 0.5 * (1 + math.tanh(product / 2))
        return lambda squared: 1 / (1 + math.sqrt(max(0.0, squared)))

    # Beginnings and ends ---------------------------------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """Make a store of texts; further arguments are the constructor's."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def save_local(self, folder: str | Path) -> None:
        """Write ``index.faiss``, ``docs.jsonl`` and ``manifest.json``; the KV is the engine's to keep.

        Raises
        ------
        ValueError
            If a document's metadata are no JSON; the folder is left as it was.
        """
        with self._lock:
            shape = Shape(self._vectors.metric, self._vectors.index_factory, self._vectors.dim)
            save(Path(folder), Saved(shape, self._vectors.index, self._documents))

    @classmethod
    def load_local(
        cls,
        folder: str | Path,
        embedding: Embeddings,
        *,
        engine: KVBoostEngine | None = None,
        precompute: bool = True,
    ) -> KVBoostVectorStore:
        """Read what `save_local` wrote.

        Parameters
        ----------
        folder
            Of the store.
        embedding
            The model that it was made with.
        engine, precompute
            Of the constructor; KV that the engine finds in its ``cache_dir`` is not computed again.

        Raises
        ------
        ValueError
            If the folder is missing, damaged or incomplete; the message names the file.
        """
        saved = load(Path(folder))
        metric: Any = saved.shape.metric
        store = cls(
            embedding, engine=engine, precompute=precompute, metric=metric, index_factory=saved.shape.index_factory
        )
        store._vectors.index = saved.index
        store._vectors.revive(saved.documents)
        store._documents = dict(saved.documents)
        store._numbers = {str(document.id): number for number, document in saved.documents.items()}
        store._next = max(saved.documents, default=-1) + 1
        store._precompute(list(saved.documents.values()))
        return store


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


def _stable_id(document: Document) -> str:
    metadata = json.dumps(document.metadata, sort_keys=True, default=str)
    return sha256(f"{document.page_content}\0{metadata}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _copy(document: Document, document_id: str | None = None) -> Document:
    return document.model_copy(update={"id": document_id or document.id}, deep=True)


def _checked(k: int) -> int:
    if k < 1:
        raise ValueError(f"k is {k}; ask for at least 1 document")
    return k


def _refuse(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"unknown arguments: {', '.join(kwargs)}; leave them out")
