"""Documents of a trace as a store is offered them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.keys import chain, content_key, prefix_seed
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV, TokenIds

__all__ = ["CHUNK_TOKENS", "StoredDocument", "make_documents"]

CHUNK_TOKENS = 256

_FINGERPRINT = "replay"


@dataclass(frozen=True, eq=False)
class StoredDocument:
    """A document's chunks, and their prefix keys."""

    chunks: tuple[ChunkKV, ...]
    prefixes: tuple[str, ...]


def make_documents(tokens: TokenIds) -> list[StoredDocument]:
    """Make documents of these lengths, of tokens that no other has, with KV as small as it can be."""
    ids = np.arange(tokens.sum())
    kv = torch.zeros(1, 1, CHUNK_TOKENS, 1)
    return [_document(str(number), part, kv) for number, part in enumerate(np.split(ids, np.cumsum(tokens)[:-1]))]


def _document(name: str, ids: TokenIds, kv: Tensor) -> StoredDocument:
    key, chunks = prefix_seed(_FINGERPRINT), []
    for index, start in enumerate(range(0, len(ids), CHUNK_TOKENS)):
        part = ids[start : start + CHUNK_TOKENS]
        key = chain(key, part)
        # All chunks share one tensor's memory; the store counts each as its own, which is what matters here.
        own = kv[:, :, : len(part)]
        chunk = Chunk(ChunkKey(key, content_key(_FINGERPRINT, part)), name, index, part)
        chunks.append(ChunkKV(chunk, own, own, own[0, 0, :, 0]))
    return StoredDocument(tuple(chunks), tuple(entry.chunk.key.prefix for entry in chunks))
