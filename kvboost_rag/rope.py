"""Rotary position embedding applied to, and taken off, stored keys.

All functions take cosines and sines from the model itself (see :mod:`kvboost_rag.model.rotation`), so a scaled table
(llama3, YaRN with its attention factor) needs nothing here. A rotation turns pairs of dimensions: the first half of the
rotary dimensions with the second half (Llama and most others), or each even one with the odd one behind it
(interleaved: GLM, Cohere). Method: RoFormer, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_into", "unrotate"]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn position-free keys into keys at a position.

    Parameters
    ----------
    keys
        ``[..., tokens, head_dim]``, any float dtype.
    cos, sin
        ``[..., tokens, pairs]``, float32, with ``2 * pairs <= head_dim``; dimensions beyond these pass through.
    interleaved
        How dimensions are paired.

    Returns
    -------
    Tensor
        The shape and dtype of ``keys``; computed in float32 and cast once.
    """
    out = torch.empty_like(keys)
    rotate_into(out, keys, cos, sin, interleaved)
    return out


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Take the rotation off keys: the inverse of :func:`rotate`, also when the tables carry a scale.

    Parameters
    ----------
    keys
        ``[..., tokens, head_dim]`` as the model cached them.
    cos, sin, interleaved
        As for :func:`rotate`, of the positions the keys were computed at.

    Returns
    -------
    Tensor
        Position-free keys, the shape and dtype of ``keys``.
    """
    # A table scaled by s rotates by s * R; the inverse is R transposed over s, which is the table over s squared.
    norm = cos.square() + sin.square()
    return rotate(keys, cos / norm, -sin / norm, interleaved)


def rotate_into(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Write :func:`rotate` of ``keys`` to ``out`` (the same shape; a view into a KV cache, but not of ``keys``)."""
    width = 2 * cos.shape[-1]
    turning = keys[..., :width].float()
    # Whole rows are faster than twice half a row, by more than putting partners in each other's place takes.
    if interleaved:
        partner = turning.reshape(*turning.shape[:-1], -1, 2).flip(-1).flatten(-2)
        cos, sin = torch.stack([cos, cos], dim=-1).flatten(-2), torch.stack([-sin, sin], dim=-1).flatten(-2)
    else:
        partner = torch.cat([turning[..., width // 2 :], turning[..., : width // 2]], dim=-1)
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    there = out[..., :width]
    turned = there if out.dtype == torch.float32 else torch.empty_like(turning)
    torch.mul(turning, cos, out=turned).addcmul_(partner, sin)
    if turned is not there:
        there.copy_(turned)
    if width < keys.shape[-1]:
        out[..., width:].copy_(keys[..., width:])
