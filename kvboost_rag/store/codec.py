"""Chunks' KV as named tensors, the way files hold it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.types import Chunk, ChunkKey, ChunkKV

__all__ = ["check_entry", "entry_of", "tensors_of"]


def tensors_of(entry: ChunkKV) -> dict[str, Tensor]:
    """Name everything of a chunk that a file must hold besides its keys and its place in the document."""
    return {
        "keys": entry.keys.to("cpu").contiguous(),
        "values": entry.values.to("cpu").contiguous(),
        "sensitivity": entry.sensitivity.contiguous(),
        "token_ids": torch.from_numpy(np.ascontiguousarray(entry.chunk.token_ids)),
    }


def entry_of(key: ChunkKey, document_id: str, index: int, tensors: Mapping[str, Tensor]) -> ChunkKV:
    """Make the chunk of what :func:`tensors_of` named.

    Raises
    ------
    KeyError
        If a tensor is missing.
    """
    chunk = Chunk(key, document_id, index, tensors["token_ids"].numpy())
    return ChunkKV(chunk, tensors["keys"], tensors["values"], tensors["sensitivity"])


def check_entry(entry: ChunkKV, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """See that a chunk that was read fits the model.

    Parameters
    ----------
    entry
        As read.
    shape, dtype
        Layers, key-value heads and head dimension of the model's KV, and its dtype.

    Raises
    ------
    ValueError
        Saying what differs.
    """
    layers, heads, width = shape
    wanted = (layers, heads, len(entry.chunk.token_ids), width)
    for tensor in (entry.keys, entry.values):
        if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            raise ValueError(f"it holds {tuple(tensor.shape)} {tensor.dtype}, not {wanted} {dtype}")
    if tuple(entry.sensitivity.shape) != wanted[2:3] or entry.sensitivity.dtype != torch.float32:
        raise ValueError(f"its sensitivity is {tuple(entry.sensitivity.shape)} {entry.sensitivity.dtype}")
