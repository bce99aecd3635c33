"""Attention masks for chosen tokens over a full cache."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["visibility", "as_bias"]


def visibility(positions: Tensor, length: int, window: int | None = None) -> Tensor:
    """Tell which cached tokens each query token may look at.

    Parameters
    ----------
    positions
        ``[tokens]`` int64, the positions of the query tokens, in any order.
    length
        Cached positions ``0 .. length - 1`` exist.
    window
        Width of a sliding window, or None for full causal attention.

    Returns
    -------
    Tensor
        ``[1, 1, tokens, length]`` bool.
    """
    columns = torch.arange(length, device=positions.device)
    rows = positions[:, None]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return seen[None, None]


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a visibility mask into an additive one (0 or the dtype's lowest number), which eager attention needs."""
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, torch.finfo(dtype).min)
