"""The stores of an engine, from its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvboost_rag.owner import Owner
from kvboost_rag.sizes import parse_bytes
from kvboost_rag.store.base import ChunkStore
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.memory import MemoryStore
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
        Whether the folder is left as it is.
    owner
        Whose files alone are served, see :class:`kvboost_rag.store.DiskStore`.

    Raises
    ------
    ValueError
        For an amount or a name that is none, or for options of a folder without one.
    """

    max_memory_bytes: int | str | None = None
    eviction: str | EvictionScore = "importance"
    cache_dir: str | Path | None = None
    max_disk_bytes: int | str | None = None
    read_only: bool = False
    owner: Owner | None = None

    def __post_init__(self) -> None:
        """Check everything that needs no folder."""
        self._bytes("max_memory_bytes")
        self._bytes("max_disk_bytes")
        parse_eviction(self.eviction)
        if self.cache_dir is None and (self.max_disk_bytes is not None or self.read_only or self.owner is not None):
            raise ValueError(
                "max_disk_bytes, read_only and secret are about cache_dir; pass that, too, or leave them out"
            )

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
    ) -> ChunkStore:
        """Put the folder behind the memory tier, if there is one.

        Parameters
        ----------
        memory
            As :meth:`memory` made it; several stores may share it.
        usage
            Shared by the tiers.
        identity, shape, dtype
            As for :class:`kvboost_rag.store.DiskStore`.
        """
        if self.folder is None:
            return memory
        disk = DiskStore(
            self.folder, identity, shape, dtype,
            max_bytes=self._bytes("max_disk_bytes"), read_only=self.read_only, usage=usage, owner=self.owner,
        )  # fmt: skip
        return TieredStore(memory, disk)

    def _bytes(self, name: str) -> int | None:
        size = getattr(self, name)
        return None if size is None else parse_bytes(size, name)
