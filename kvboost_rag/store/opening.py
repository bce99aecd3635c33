"""The stores of an engine, from its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvboost_rag.owner import Owner
from kvboost_rag.sizes import parse_bytes
from kvboost_rag.store.base import ChunkStore, logger
from kvboost_rag.store.chained import ChainedStore
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.redis_client import check_server
from kvboost_rag.store.redis_store import RedisStore
from kvboost_rag.store.redis_tier import RedisTier
from kvboost_rag.store.tiered import TieredStore
from kvboost_rag.usage import UsageLedger

__all__ = ["StoreOptions"]


@dataclass(frozen=True)
class StoreOptions:
    """Where KV is kept, and how much of it.

    Parameters
    ----------
    max_memory_bytes
        Budget in memory: bytes, or text as ``"4GiB"``; None for no limit.
    eviction
        See :func:`kvboost_rag.store.parse_eviction`.
    cache_dir
        Folder in which KV outlives the process; None keeps it in memory alone.
    max_disk_bytes
        Budget of that folder, over all models and processes; None for no limit.
    read_only
        Whether the folder and the shared tier are left as they are.
    owner
        Whose KV alone is served from there, see :class:`kvboost_rag.store.DiskStore`.
    shared
        The server that other machines share; None for none.
    trusted_only
        Whether nothing but what the owner put there may be served.

    Raises
    ------
    ValueError
        For an amount or a name that is none, for options of a folder or shared tier without one, or for
        ``trusted_only`` with one of these and without an owner.
    """

    max_memory_bytes: int | str | None = None
    eviction: str | EvictionScore = "importance"
    cache_dir: str | Path | None = None
    max_disk_bytes: int | str | None = None
    read_only: bool = False
    owner: Owner | None = None
    shared: RedisTier | None = None
    trusted_only: bool = False

    def __post_init__(self) -> None:
        """Check everything that needs no folder and no server."""
        self._bytes("max_memory_bytes")
        self._bytes("max_disk_bytes")
        parse_eviction(self.eviction)
        if self.cache_dir is None and self.max_disk_bytes is not None:
            raise ValueError("max_disk_bytes is about cache_dir; pass that, too, or leave it out")
        if self.cache_dir is None and self.shared is None and (self.read_only or self.owner is not None):
            raise ValueError("read_only and secret are about cache_dir or store; pass one of these, or leave them out")
        if self.trusted_only and not (self.cache_dir is None and self.shared is None) and self.owner is None:
            raise ValueError(
                "trusted_only needs a secret for cache_dir and store, or whoever can write there could change "
                "documents' KV; pass secret=secrets.token_hex(32), kept where your keys are"
            )

    def check_shared(self) -> None:
        """See that the shared tier lets us in, if there is one; one that is away (a log line says so) may come back.

        Raises
        ------
        ImportError
            If its client is missing.
        ValueError
            If it does not let us in.
        """
        away = check_server(self.shared) if self.shared is not None else ""
        if away:
            logger.warning("%s: going on without the shared tier until it can be reached", away)

    @property
    def folder(self) -> Path | None:
        """The cache folder as a path."""
        return None if self.cache_dir is None else Path(self.cache_dir)

    def memory(self, usage: UsageLedger) -> MemoryStore:
        """Make the memory tier alone."""
        return MemoryStore(self._bytes("max_memory_bytes"), eviction=self.eviction, usage=usage)

    def store(
        self,
        memory: MemoryStore,
        usage: UsageLedger,
        identity: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        prefill_rate: Callable[[], float],
    ) -> ChunkStore:
        """Put the folder and the shared tier behind the memory tier, as far as there are any.

        Parameters
        ----------
        memory
            As :meth:`memory` made it; several stores may share it.
        usage
            Shared by the tiers.
        identity, shape, dtype
            As for :class:`kvboost_rag.store.DiskStore`.
        prefill_rate
            Measures how many tokens a second can be computed; called if the shared tier does not say it.
        """
        behind: list[ChunkStore] = []
        if self.folder is not None:
            behind.append(self._disk(self.folder, usage, identity, shape, dtype))
        if self.shared is not None:
            rate = self.shared.prefill_rate or prefill_rate()
            behind.append(
                RedisStore(
                    self.shared, identity, shape, dtype,
                    prefill_rate=rate, read_only=self.read_only, owner=self.owner,
                )  # fmt: skip
            )
        return TieredStore(memory, behind[0] if len(behind) == 1 else ChainedStore(*behind)) if behind else memory

    def _disk(
        self, folder: Path, usage: UsageLedger, identity: str, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> DiskStore:
        return DiskStore(
            folder, identity, shape, dtype,
            max_bytes=self._bytes("max_disk_bytes"), read_only=self.read_only, usage=usage, owner=self.owner,
        )  # fmt: skip

    def _bytes(self, name: str) -> int | None:
        size = getattr(self, name)
        return None if size is None else parse_bytes(size, name)
