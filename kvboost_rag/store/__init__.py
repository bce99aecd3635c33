"""Where chunks' KV is kept."""

from kvboost_rag.store.base import ChunkStore
from kvboost_rag.store.chunk_file import ChunkFile
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.folder import read_headers, verify_files
from kvboost_rag.store.layout import stale_files
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.tiered import TieredStore

__all__ = [
    "ChunkFile", "ChunkStore", "DiskStore", "EvictionScore", "MemoryStore", "TieredStore", "parse_eviction",
    "read_headers", "stale_files", "verify_files",
]  # fmt: skip
