"""An index of faiss whose vectors have numbers, can be taken away, and can be searched in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import faiss
import numpy as np
import numpy.typing as npt

__all__ = ["Metric", "Vectors"]

# The stubs that faiss brings along lack half of what these classes take.
_faiss: Any = faiss

Metric = Literal["cosine", "ip", "l2"]
Matrix = npt.NDArray[np.float32]


class Vectors:
    """Numbered vectors.

    Parameters
    ----------
    metric
        ``"cosine"`` (the inner product of normalised vectors), ``"ip"`` (the inner product) or ``"l2"`` (the squared
        Euclidean distance, the smaller the nearer).
    index_factory
        As faiss writes it: ``"Flat"``, ``"HNSW32"``, ``"IVF64,Flat"``. The first vectors train what needs training.
    index
        A saved one, or None for an empty one.

    Raises
    ------
    ValueError
        If the metric is not known.

    Notes
    -----
    Only flat indexes let go of a vector. In others it stays, dead: no search returns it, and the index is made anew
    when more vectors are dead than alive.
    """

    def __init__(self, metric: Metric, index_factory: str, index: Any = None) -> None:
        if metric not in ("cosine", "ip", "l2"):
            raise ValueError(f"metric={metric!r} is not known; pass 'cosine', 'ip' or 'l2'")
        self.metric = metric
        self.index_factory = index_factory
        self.index = index
        self._alive: set[int] = set()

    @property
    def dim(self) -> int | None:
        """Length of a vector; None before the first."""
        return None if self.index is None else int(self.index.d)

    @property
    def nearer_is_larger(self) -> bool:
        """Whether a larger score is a nearer vector."""
        return self.metric != "l2"

    def revive(self, numbers: Iterable[int]) -> None:
        """Say which vectors of a saved index are alive."""
        self._alive = set(numbers)

    def prepared(self, vectors: Sequence[Sequence[float]]) -> Matrix:
        """Turn vectors into what the index takes: ``[vectors, dim]`` float32, normalised for cosine.

        Raises
        ------
        ValueError
            If they are no numbers, or of another length than those in the index.
        """
        matrix = np.array(vectors, dtype=np.float32, order="C")
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise ValueError(f"embeddings are no finite vectors of one length (shape {matrix.shape}); check the model")
        if self.dim is not None and matrix.shape[1] != self.dim:
            raise ValueError(
                f"embeddings have length {matrix.shape[1]}, but the index holds vectors of length {self.dim}; use the "
                "model that it was made with"
            )
        if self.metric == "cosine":
            norms = np.linalg.norm(matrix, axis=1, keepdims=True)
            matrix /= np.where(norms > 0, norms, 1)
        return matrix

    def make_ready(self, vectors: Matrix) -> None:
        """Make and train the index, unless it is.

        Raises
        ------
        ValueError
            If faiss can not make it, or these vectors are too few to train it.
        """
        if self.index is None:
            self.index = self._made(vectors.shape[1])
        if not self.index.is_trained:
            self._train(vectors)

    def add(self, numbers: Sequence[int], vectors: Matrix) -> None:
        """Add prepared vectors under numbers that are not in use."""
        self.make_ready(vectors)
        self.index.add_with_ids(vectors, np.asarray(numbers, dtype=np.int64))
        self._alive.update(numbers)

    def remove(self, numbers: Iterable[int]) -> None:
        """Take vectors away."""
        gone = set(numbers) & self._alive
        if not gone:
            return
        self._alive -= gone
        if isinstance(self._inner(), faiss.IndexFlat):
            self.index.remove_ids(np.fromiter(gone, dtype=np.int64))
        elif self._dead > len(self._alive):
            self._remake()

    def get(self, numbers: Sequence[int]) -> Matrix:
        """Return vectors as they are in the index: ``[numbers, dim]`` float32."""
        found = [self.index.reconstruct(int(number)) for number in numbers]
        return np.asarray(found, dtype=np.float32).reshape(len(found), self.dim or 0)

    def search(self, vector: Matrix, k: int, allowed: Iterable[int] | None = None) -> list[tuple[int, float]]:
        """Find the nearest vectors.

        Parameters
        ----------
        vector
            ``[1, dim]``, prepared.
        k
            How many are wanted.
        allowed
            Numbers to search among; None for all.

        Returns
        -------
        list[tuple[int, float]]
            Numbers and scores, nearest first; ``k`` of them, or all if there are fewer.
        """
        chosen = self._alive if allowed is None else self._alive & set(allowed)
        k = min(k, len(chosen))
        if k < 1:
            return []
        parameters = {} if len(chosen) == self.index.ntotal else {"params": self._parameters(chosen, k)}
        scores, numbers = self.index.search(vector, k, **parameters)
        found = [(int(n), float(s)) for n, s in zip(numbers[0], scores[0], strict=True) if n >= 0]
        # Graphs and cells may miss some when few vectors are allowed.
        return found if len(found) == k else self._scanned(vector, k, sorted(chosen))

    @property
    def _dead(self) -> int:
        return int(self.index.ntotal) - len(self._alive)

    def _scanned(self, vector: Matrix, k: int, numbers: Sequence[int]) -> list[tuple[int, float]]:
        vectors = self.get(numbers)
        scores = vectors @ vector[0] if self.nearer_is_larger else ((vectors - vector[0]) ** 2).sum(axis=1)
        order = np.argsort(-scores if self.nearer_is_larger else scores, kind="stable")[:k]
        return [(numbers[i], float(scores[i])) for i in order]

    def _made(self, dim: int) -> Any:
        kind = faiss.METRIC_L2 if self.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        try:
            return faiss.IndexIDMap2(faiss.index_factory(dim, self.index_factory, kind))
        except RuntimeError as error:
            raise ValueError(
                f"faiss can not make index_factory={self.index_factory!r}; pass for example 'Flat', 'HNSW32' or "
                "'IVF64,Flat'"
            ) from error

    def _train(self, vectors: Matrix) -> None:
        try:
            self.index.train(vectors)
        except RuntimeError as error:
            self.index = None
            raise ValueError(
                f"{len(vectors)} texts are too few to train index_factory={self.index_factory!r}; add more at the "
                "first call, or take 'Flat'"
            ) from error
        if isinstance(self._inner(), faiss.IndexIVF):
            # Without it no vector can be read back; and one cell alone would miss most neighbours.
            self._inner().make_direct_map()
            self._inner().nprobe = max(1, self._inner().nlist // 4)

    def _remake(self) -> None:
        numbers = sorted(self._alive)
        vectors = self.get(numbers)
        self.index.reset()
        self._alive = set()
        if numbers:
            self.add(numbers, vectors)

    def _inner(self) -> Any:
        return faiss.downcast_index(self.index.index)

    def _parameters(self, chosen: set[int], k: int) -> Any:
        selector = faiss.IDSelectorBatch(np.fromiter(chosen, dtype=np.int64))
        inner = self._inner()
        if isinstance(inner, faiss.IndexHNSW):
            return _faiss.SearchParametersHNSW(sel=selector, efSearch=max(inner.hnsw.efSearch, k))
        if isinstance(inner, faiss.IndexIVF):
            return _faiss.SearchParametersIVF(sel=selector, nprobe=inner.nprobe)
        return _faiss.SearchParameters(sel=selector)
