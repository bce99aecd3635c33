"""The contract of a chunk store."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds
from kvboost_rag.usage import Event

__all__ = ["ChunkStore", "same_tokens"]

logger = logging.getLogger("kvboost_rag.store")


class ChunkStore(ABC):
    """Chunks by their two keys.

    A store never returns a chunk whose token ids differ from those asked for, and never raises because of a damaged
    or missing entry: that is a miss, and a log line says why.

    What :meth:`note`, :meth:`hold`, :meth:`pin`, :meth:`prefetch` and :meth:`flush` do here, which is nothing, is right
    for a store that never evicts, has nothing slower behind it, and writes at once.
    """

    @abstractmethod
    def put(self, entry: ChunkKV) -> bool:
        """Offer a chunk; whether it is kept now (if not, a log line says why).

        The chunks of one document are offered from its beginning on.
        """

    def wants(self, prefix: str) -> bool:
        """Whether a chunk with this prefix key would be kept if it were put now, as far as can be told without it."""
        return True

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

    def note(self, prefixes: Iterable[str], event: Event) -> None:  # noqa: B027
        """Tell what happened to chunks, stored or not; what is retrieved and used often is kept longer.

        Parameters
        ----------
        prefixes
            Prefix keys of the chunks of all documents of one request; chunks that are offered because a request used
            them are noted first. Stores that share a :class:`kvboost_rag.usage.UsageLedger` are told once, by one of
            them.
        event
            What happened.
        """

    def hold(self) -> AbstractContextManager[None]:
        """Keep what a request works with: nothing got, found or put while this is open is evicted until it closes.

        Holds may overlap, in one thread or in several; :meth:`delete` takes no notice of them.
        """
        return nullcontext()

    def pin(self, prefixes: Iterable[str]) -> None:  # noqa: B027
        """Never evict chunks with these prefix keys, stored now or later, until they are unpinned as often."""

    def unpin(self, prefixes: Iterable[str]) -> None:  # noqa: B027
        """Take back one :meth:`pin` of each prefix key.

        Raises
        ------
        ValueError
            If one is not pinned; then nothing was unpinned.
        """

    def prefetch(self, wanted: Iterable[tuple[str, TokenIds]]) -> None:  # noqa: B027
        """Begin to move chunks to where they are read fastest, without waiting for it.

        Parameters
        ----------
        wanted
            Prefix keys and token ids as for :meth:`get`; what is not stored is passed over.
        """

    def flush(self) -> None:  # noqa: B027
        """Wait until everything that was put is where it outlives the process, if this store has such a place."""

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

    @property
    def disk_bytes(self) -> int:
        """Bytes of files, for a store that has some."""
        return 0

    @property
    def shared_hits(self) -> int:
        """Chunks that were read from a store which other machines share, for one that does."""
        return 0

    def detach(self) -> None:  # noqa: B027 - most stores have nothing behind them
        """Close what is behind a memory tier that other stores share, and leave that tier as it is."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Release what the store holds open."""


def same_tokens(entry: ChunkKV, token_ids: TokenIds) -> bool:
    """Whether an entry holds exactly these tokens; a difference under one key is logged as the collision it is."""
    if np.array_equal(entry.chunk.token_ids, token_ids):
        return True
    logger.warning("stored KV of document %r is of other tokens, so it is not used", entry.chunk.document_id)
    return False
