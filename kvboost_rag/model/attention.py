"""Attention of chosen tokens over a long cache, for the CPU.

Transformers' ``sdpa`` repeats the key and value heads for every query group and multiplies masked blocks out; for a few
tokens over a long prompt that is most of a layer's time. This function, registered under a name of its own through
transformers' public attention interface, does neither; whatever it has no faster way for goes to ``sdpa`` unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

__all__ = ["BLOCK", "block_ends", "chosen_tokens_attention"]

BLOCK = 64
"""Query tokens per block: smaller ones pay more calls, larger ones multiply more of the mask out."""

_NAME = "kvboost_sdpa"
_KNOWN = ("position_ids", "use_cache", "sliding_window", "kvboost_ends", "output_attentions", "cache_position")


@contextmanager
def chosen_tokens_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Let a model that attends by ``sdpa`` use this function for the length of one forward; tells whether it does."""
    config = model.config
    before = config._attn_implementation
    if before != "sdpa" or model.device.type != "cpu":
        yield False
        return
    AttentionInterface.register(_NAME, _attend)
    try:
        config._attn_implementation = _NAME
        yield True
    finally:
        config._attn_implementation = before


def block_ends(slots: Tensor) -> list[int]:
    """For each block of query tokens, how many cached tokens its last one sees; ``slots`` ascend."""
    last = torch.arange(BLOCK, slots.numel() + BLOCK, BLOCK).clamp_max(slots.numel()) - 1
    return (slots[last] + 1).tolist()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kvboost_ends: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, with ``query`` ``[1, heads, tokens, head_dim]`` and an additive mask ``[1, 1, tokens, length]``."""
    unusual = any(v is not None and v is not False for name, v in kwargs.items() if name not in _KNOWN)
    if attention_mask is None or kvboost_ends is None or unusual or dropout:
        plain = AttentionInterface()["sdpa"]
        out: tuple[Tensor, Tensor | None] = plain(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    blocks = [
        scaled_dot_product_attention(
            query[:, :, start : start + BLOCK],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=attention_mask[:, :, start : start + BLOCK, :end],
            scale=scaling,
            enable_gqa=True,
        )
        for start, end in zip(range(0, query.shape[2], BLOCK), kvboost_ends, strict=True)
    ]
    joined = torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]
    return joined.transpose(1, 2).contiguous(), None
