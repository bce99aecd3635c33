"""The contract of a chunk store."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds

__all__ = ["ChunkStore", "same_tokens"]

logger = logging.getLogger("kvboost_rag.store")


class ChunkStore(ABC):
    """Chunks by their two keys.

    A store never returns a chunk whose token ids differ from those asked for, and never raises because of a damaged
    or missing entry: that is a miss, and a log line says why.
    """

    @abstractmethod
    def put(self, entry: ChunkKV) -> bool:
        """Keep a chunk; False (and a log line) if it does not fit."""

    @abstractmethod
    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return the chunk with this prefix key and these tokens: the same tokens after the same tokens."""

    @abstractmethod
    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Return any chunk with this content key and these tokens: the same tokens after another history."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk; nothing happens if it is not there."""

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:  # noqa: B027
        """Forget chunks that an earlier process stored for a document and that ``is_used`` knows no use for."""

    @abstractmethod
    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is stored."""

    @abstractmethod
    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the chunks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all stored chunks."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Release what the store holds open."""


def same_tokens(entry: ChunkKV, token_ids: TokenIds) -> bool:
    """Whether an entry holds exactly these tokens; a difference under one key is logged as the collision it is."""
    if np.array_equal(entry.chunk.token_ids, token_ids):
        return True
    logger.warning("chunk %s holds other tokens than asked for: treated as a miss", entry.chunk.key.prefix)
    return False
