"""Chunks with KV that a seed decides, for tests of stores."""

from __future__ import annotations

import numpy as np
import torch

from kvboost_rag.keys import chain, content_key, prefix_seed
from kvboost_rag.store.codec import tensors_of
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV

IDENTITY = "0" * 32
SHAPE = (2, 2, 8)
DTYPE = torch.float32


def make_chunk(seed: int, *, document_id: str | None = None, index: int = 0, tokens: int = 16) -> ChunkKV:
    """Return the same chunk for the same arguments, in every process."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 1000, tokens)
    key = ChunkKey(chain(prefix_seed(f"{seed}/{index}"), ids), content_key("", ids))
    layers, heads, width = SHAPE
    keys, values = torch.from_numpy(random.standard_normal((2, layers, heads, tokens, width), dtype=np.float32))
    sensitivity = torch.from_numpy(random.random(tokens, dtype=np.float32))
    chunk = Chunk(key, f"document-{seed}" if document_id is None else document_id, index, ids)
    return ChunkKV(chunk, keys, values, sensitivity)


def same(entry: ChunkKV | None, expected: ChunkKV) -> bool:
    """Whether two chunks are equal bit for bit, in everything."""
    if entry is None:
        return False
    a, b = entry.chunk, expected.chunk
    alike = (a.key, a.document_id, a.index) == (b.key, b.document_id, b.index)
    found, wanted = tensors_of(entry), tensors_of(expected)
    return alike and found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def get(store, entry: ChunkKV) -> ChunkKV | None:
    """Ask a store for a chunk."""
    return store.get(entry.chunk.key.prefix, entry.chunk.token_ids)
