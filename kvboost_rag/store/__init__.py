"""Where chunks' KV is kept."""

from kvboost_rag.store.base import ChunkStore
from kvboost_rag.store.chained import ChainedStore
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.eviction import EvictionScore, parse_eviction
from kvboost_rag.store.folder import read_headers, verify_files
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import chunk_paths, make_folder, stale_files
from kvboost_rag.store.memory import MemoryStore
from kvboost_rag.store.opening import StoreOptions
from kvboost_rag.store.pruning import prune_folder
from kvboost_rag.store.redis_store import RedisStore
from kvboost_rag.store.redis_tier import RedisTier, redis_tier
from kvboost_rag.store.tiered import TieredStore
from kvboost_rag.store.usage_file import read_usage

__all__ = [
    "ChainedStore", "ChunkFile", "ChunkStore", "DiskStore", "EvictionScore", "MemoryStore", "RedisStore", "RedisTier",
    "StoreOptions", "TieredStore", "chunk_paths", "make_folder", "parse_eviction", "prune_folder", "read_headers",
    "read_usage", "redis_tier", "stale_files", "verify_files",
]  # fmt: skip
