"""A vector store on faiss that computes KV while it indexes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from kvboost_rag import KVBoostEngine
from langchain_kvboost.documents import to_engine
from langchain_kvboost.persistence import Saved, Shape, load, save
from langchain_kvboost.searching import SearchableStore, copied, refuse
from langchain_kvboost.vectors import Matrix, Metric, Vectors

__all__ = ["KVBoostVectorStore"]


class KVBoostVectorStore(SearchableStore):
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
        super().__init__(embedding, Vectors(metric, index_factory))
        self._engine = engine if precompute else None
        self._next = 0

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
        refuse(kwargs)
        given = [document.id for document in documents] if ids is None else list(ids)
        if len(given) != len(documents):
            raise ValueError(f"there are {len(given)} ids for {len(documents)} documents; give one for each")
        named = [copied(d, i or _stable_id(d)) for d, i in zip(documents, given, strict=True)]
        latest = list({str(document.id): document for document in named}.values())
        if latest:
            embedded = self._embedding.embed_documents([d.page_content for d in latest])
            with self._lock:
                vectors = self._vectors.prepared(embedded)
                # Before any KV is computed for texts that could not be indexed.
                self._vectors.make_ready(vectors)
            self._precompute(latest)
            self._replace(latest, vectors)
        return [str(document.id) for document in named]

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts; see `add_documents`.

        Parameters
        ----------
        texts
            Any iterable of them, but no single text.
        metadatas, ids
            One for each text, or None.
        **kwargs
            None.

        Returns
        -------
        list[str]
            Their ids.

        Raises
        ------
        ValueError
            If ``texts`` is one text, or there are more or fewer metadata or ids than texts. Nothing is added then.
        """
        refuse(kwargs)
        if isinstance(texts, str):
            raise ValueError("texts is a single text; pass a list of texts")
        listed = list(texts)
        metadata = [{} for _ in listed] if metadatas is None else list(metadatas)
        if len(metadata) != len(listed):
            raise ValueError(f"there are {len(metadata)} metadatas for {len(listed)} texts; give one for each")
        documents = [Document(page_content=t, metadata=m or {}) for t, m in zip(listed, metadata, strict=True)]
        return self.add_documents(documents, ids=ids)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents and their KV; ids that are not known are passed over, None deletes everything."""
        refuse(kwargs)
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


def _stable_id(document: Document) -> str:
    metadata = json.dumps(document.metadata, sort_keys=True, default=str)
    return sha256(f"{document.page_content}\0{metadata}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
