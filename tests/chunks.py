<<<<<<< HEAD
"""Chunks with tensors as small as they can be."""
=======
"""Chunks with KV that a seed decides, for tests of stores."""
>>>>>>> c59d48f (Disk store: locked writes under one budget, an index that sees other processes; write-behind and prefetch)

from __future__ import annotations

import numpy as np
import torch

from kvboost_rag.keys import chain, content_key, prefix_seed
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV

<<<<<<< HEAD
BYTES_A_TOKEN = 4 + 4 + 4 + 8


def document(name: str, lengths: list[int]) -> list[ChunkKV]:
    """Make a document's chunks; documents whose names begin alike, up to the length of a chunk, share chunks."""
    key, entries = prefix_seed("model"), []
    for index, length in enumerate(lengths):
        ids = np.full(length, index, dtype=np.int64)
        ids[0] = ord(name[min(index, len(name) - 1)])
        key = chain(key, ids)
        chunk = Chunk(ChunkKey(key, content_key("model", ids)), name, index, ids)
        kv = torch.full((1, 1, length, 1), float(index))
        entries.append(ChunkKV(chunk, kv, kv + 1, torch.zeros(length)))
    return entries


def prefixes(entries: list[ChunkKV]) -> list[str]:
    return [entry.chunk.key.prefix for entry in entries]
=======
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
    return alike and np.array_equal(a.token_ids, b.token_ids) and all(
        torch.equal(getattr(entry, name), getattr(expected, name)) for name in ("keys", "values", "sensitivity")
    )  # fmt: skip


def get(store, entry: ChunkKV) -> ChunkKV | None:
    """Ask a store for a chunk."""
    return store.get(entry.chunk.key.prefix, entry.chunk.token_ids)
>>>>>>> c59d48f (Disk store: locked writes under one budget, an index that sees other processes; write-behind and prefetch)
