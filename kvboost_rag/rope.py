"""Rotary position embedding applied to, and taken off, stored keys.

Both functions take the cosine and sine tables from the model itself (see :mod:`kvboost_rag.model`), so a scaled table
(llama3, YaRN with its attention factor) needs nothing here. They follow the half-split convention: the first half of
the rotary dimensions is paired with the second half. Method: RoFormer, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_into", "unrotate"]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn position-free keys into keys at a position.

    Parameters
    ----------
    keys
        ``[..., tokens, head_dim]``, any float dtype.
    cos, sin
        ``[tokens, rotary_dim]``, float32, with ``rotary_dim <= head_dim``; dimensions beyond it pass through.

    Returns
    -------
    Tensor
        The shape and dtype of ``keys``; computed in float32 and cast once.
    """
    out = torch.empty_like(keys)
    rotate_into(out, keys, cos, sin)
    return out


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Take the rotation off keys: the inverse of :func:`rotate`, also when the tables carry a scale.

    Parameters
    ----------
    keys
        ``[..., tokens, head_dim]`` as the model cached them.
    cos, sin
        ``[tokens, rotary_dim]``, float32, of the positions the keys were computed at.

    Returns
    -------
    Tensor
        Position-free keys, the shape and dtype of ``keys``.
    """
    # A table scaled by s rotates by s * R; the inverse is R transposed over s, which is the table over s squared.
    norm = cos.square() + sin.square()
    return rotate(keys, cos / norm, -sin / norm)


def rotate_into(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write :func:`rotate` of ``keys`` to ``out`` (the same shape; a view into a KV cache, but not of ``keys``)."""
    width = cos.shape[-1]
    half = width // 2
    turning = keys[..., :width].float()
    # Whole rows are faster than twice half a row, by more than putting the halves in each other's place takes.
    partner = torch.cat([turning[..., half:], turning[..., :half]], dim=-1)
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    there = out[..., :width]
    turned = there if out.dtype == torch.float32 else torch.empty_like(turning)
    torch.mul(turning, cos, out=turned).addcmul_(partner, signed)
    if turned is not there:
        there.copy_(turned)
    if width < keys.shape[-1]:
        out[..., width:].copy_(keys[..., width:])
