"""Chunks' KV as named tensors, the way files hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.types import Chunk, ChunkKey, ChunkKV, Quantized

__all__ = ["check_entry", "entry_of", "most_bytes", "tensors_of"]


def tensors_of(entry: ChunkKV) -> dict[str, Tensor]:
    """Name everything of a chunk that a file must hold besides its keys and its place in the document.

    Native keys are named ``keys``, quantised ones ``keys.codes``, ``keys.scale`` and so on; values likewise.
    """
    return {
        **_named("keys", entry.keys),
        **_named("values", entry.values),
        "sensitivity": entry.sensitivity.contiguous(),
        "token_ids": torch.from_numpy(np.ascontiguousarray(entry.chunk.token_ids)),
    }


def _named(name: str, x: Tensor | Quantized) -> dict[str, Tensor]:
    parts = {name: x} if isinstance(x, Tensor) else {f"{name}.{part}": tensor for part, tensor in x.parts.items()}
    return {part: tensor.to("cpu").contiguous() for part, tensor in parts.items()}


def entry_of(key: ChunkKey, document_id: str, index: int, tensors: Mapping[str, Tensor]) -> ChunkKV:
    """Make the chunk of what :func:`tensors_of` named.

    Raises
    ------
    KeyError
        If a tensor is missing.
    """
    chunk = Chunk(key, document_id, index, tensors["token_ids"].numpy())
    return ChunkKV(chunk, _read("keys", tensors), _read("values", tensors), tensors["sensitivity"])


def _read(name: str, tensors: Mapping[str, Tensor]) -> Tensor | Quantized:
    if name in tensors:
        return tensors[name]
    return Quantized(**{part.name: tensors[f"{name}.{part.name}"] for part in fields(Quantized)})


def most_bytes(shape: tuple[int, int, int], dtype: torch.dtype, tokens: int) -> int:
    """Bytes of a native chunk's tensors, which no other form exceeds; arguments as of :func:`check_entry`."""
    layers, heads, width = shape
    return tokens * (2 * layers * heads * width * dtype.itemsize + torch.float32.itemsize + torch.int64.itemsize)


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
    ids = entry.chunk.token_ids
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise ValueError(f"its token ids are {ids.shape} {ids.dtype}")
    for x in (entry.keys, entry.values):
        if isinstance(x, Quantized):
            _check_quantized(x, wanted)
        if tuple(x.shape) != wanted or x.dtype != dtype:
            raise ValueError(f"it holds {tuple(x.shape)} {x.dtype}, not {wanted} {dtype}")
        _check_finite(x.first if isinstance(x, Quantized) else x)
    if tuple(entry.sensitivity.shape) != wanted[2:3] or entry.sensitivity.dtype != torch.float32:
        raise ValueError(f"its sensitivity is {tuple(entry.sensitivity.shape)} {entry.sensitivity.dtype}")
    _check_finite(entry.sensitivity, lowest=0.0)


def _check_finite(x: Tensor, lowest: float = -math.inf) -> None:
    """See that there are numbers only; one that is none would make every logit behind it none."""
    if not x.numel():
        return
    low, high = (float(end) for end in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high) and low >= lowest):
        raise ValueError(f"it holds numbers from {low} to {high}")


def _check_quantized(x: Quantized, wanted: tuple[int, int, int, int]) -> None:
    """See that the parts fit each other and give finite numbers."""
    shapes = {name: tuple(part.shape) for name, part in x.parts.items()}
    layers, heads, tokens, width = wanted
    rest = tokens - x.first.shape[2] if x.first.ndim == 4 else 0
    groups = x.scale.shape[2] if x.scale.ndim == 4 else 0
    fit = (
        0 < groups <= rest
        # As many groups as there are when all but the last have one length.
        and groups == -(-rest // -(-rest // groups))
        and shapes["first"] == (layers, heads, tokens - rest, width)
        and shapes["codes"] in ((layers, heads, rest, width), (layers, heads, rest, width / 2))
        and shapes["scale"] in ((layers, heads, groups, width), (layers, heads, groups, 1))
        and shapes["offset"] == shapes["scale"]
    )
    if not fit:
        raise ValueError(f"its parts have the shapes {shapes}, which do not fit {wanted}")
    if x.codes.dtype != torch.uint8 or {x.scale.dtype, x.offset.dtype} not in ({torch.float16}, {torch.float32}):
        raise ValueError(f"its codes are {x.codes.dtype}, its scale and offset {x.scale.dtype} and {x.offset.dtype}")
    farthest = x.offset.float().abs() + (2**x.bits - 1) * x.scale.float()
    # What is no number is not below anything.
    if not ((x.scale >= 0).all() and (farthest <= torch.finfo(x.dtype).max).all()):
        raise ValueError("its scale or offset leads to numbers that are none, or a scale is negative")
