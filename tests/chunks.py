"""Chunks with tensors as small as they can be."""

from __future__ import annotations

import numpy as np
import torch

from kvboost_rag.keys import chain, content_key, prefix_seed
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV

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
