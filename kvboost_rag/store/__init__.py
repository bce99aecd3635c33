"""Where chunks' KV is kept."""

from kvboost_rag.store.base import ChunkStore
from kvboost_rag.store.disk import ChunkFile, DiskStore, read_headers
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.tiered import TieredStore

__all__ = [
    "ChunkFile", "ChunkStore", "DiskStore", "EvictionScore", "MemoryStore", "TieredStore", "parse_eviction",
    "read_headers",
]  # fmt: skip
