"""Attention masks for chosen tokens over a full cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Columns", "as_bias", "visibility"]


@dataclass(frozen=True, eq=False)
class Columns:
    """Cached tokens that do not stand one behind the other.

    Parameters
    ----------
    positions
        ``[slots]`` int64, the position of each.
    bias
        ``[slots]`` float32, added to its attention scores.
    """

    positions: Tensor
    bias: Tensor

    def to(self, device: torch.device) -> Columns:
        """Move to a device."""
        return Columns(self.positions.to(device), self.bias.to(device))

    def followed_by(self, positions: Tensor) -> Columns:
        """Append tokens without a bias."""
        unbiased = self.bias.new_zeros(len(positions))
        return Columns(torch.cat([self.positions, positions]), torch.cat([self.bias, unbiased]))


def visibility(positions: Tensor, columns: Tensor, window: int | None = None) -> Tensor:
    """Tell which cached tokens each query token may look at.

    Parameters
    ----------
    positions
        ``[tokens]`` int64, the positions of the query tokens, in any order.
    columns
        ``[length]`` int64, the positions of the cached tokens.
    window
        Width of a sliding window, or None for full causal attention.

    Returns
    -------
    Tensor
        ``[1, 1, tokens, length]`` bool.
    """
    rows = positions[:, None]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return seen[None, None]


def as_bias(seen: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Turn a visibility mask into an additive one, which eager attention needs.

    It is the bias of each column, ``[length]``, or 0, and the dtype's lowest number where nothing is seen.
    """
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    if bias is not None:
        added += bias.to(dtype)
    return added.masked_fill_(~seen, torch.finfo(dtype).min)
