"""Attention of chosen tokens over a long cache.

On a CPU, transformers' ``sdpa`` repeats the key and value heads for every query group and multiplies masked blocks out;
for a few tokens over a long prompt that is most of a layer's time. This function, registered under a name of its own
through transformers' public attention interface, does neither; whatever it has no faster way for goes to ``sdpa``
unchanged. It also lets a watcher see whom the last tokens look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

__all__ = [
    "BLOCK", "MOST_WATCHED", "PASSED_OVER", "Watcher", "block_ends", "chosen_tokens_attention",
    "eager_attention_watched",
]  # fmt: skip

BLOCK = 64
"""Query tokens per block: smaller ones pay more calls, larger ones multiply more of the mask out."""

MOST_WATCHED = 32
"""The last so many query tokens can be watched: they hold the end of the question, and their cost stays bounded."""

Watcher = Callable[[Tensor], None]
"""Takes how much attention each position gets from each of the last tokens, ``[tokens, length]`` float32."""

_NAME = "kvboost_sdpa"
PASSED_OVER = ("position_ids", "use_cache", "sliding_window", "kvboost_ends", "output_attentions", "cache_position")
"""Arguments that change nothing where the mask says all."""


@contextmanager
def chosen_tokens_attention(model: PreTrainedModel, *, watched: bool = False) -> Iterator[bool]:
    """Let a model that attends by ``sdpa`` use this function for the length of one forward.

    Parameters
    ----------
    model
        Any; one that attends otherwise, or on another device without being watched, is left alone.
    watched
        Whether a watcher is among the layers' arguments.

    Yields
    ------
    bool
        Whether the function is in use and wants to know its blocks.
    """
    config = model.config
    before, on_cpu = config._attn_implementation, model.device.type == "cpu"
    if before != "sdpa" or not (on_cpu or watched):
        yield False
        return
    AttentionInterface.register(_NAME, _attend)
    try:
        config._attn_implementation = _NAME
        yield on_cpu
    finally:
        config._attn_implementation = before


@contextmanager
def eager_attention_watched(layers: Iterable[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Watch decoder layers of a model that attends by ``eager``, whose attention modules return their weights."""
    with ExitStack() as stack:
        for layer in layers:
            # Some families number the layer itself too.
            attention = next(m for m in layer.modules() if m is not layer and hasattr(m, "layer_idx"))

            def hook(module: nn.Module, args: object, out: tuple[Tensor, Tensor]) -> None:
                watcher(out[1][0, :, -MOST_WATCHED:].float().mean(dim=0))

            stack.callback(attention.register_forward_hook(hook).remove)
        yield


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
    kvboost_watcher: Watcher | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, with ``query`` ``[1, heads, tokens, head_dim]`` and an additive mask ``[1, 1, tokens, length]``."""
    if kvboost_watcher is not None:
        kvboost_watcher(_looked_at(query, key, attention_mask, scaling))
    unusual = any(v is not None and v is not False for name, v in kwargs.items() if name not in PASSED_OVER)
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


def _looked_at(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Mean over the heads of the last query tokens' attention: ``[tokens, length]`` float32."""
    kv_heads, length = key.shape[1], key.shape[2]
    last = query[0, :, -MOST_WATCHED:].float()
    grouped = last.reshape(kv_heads, -1, last.shape[-1])
    scores = grouped @ key[0].float().mT * (scaling or last.shape[-1] ** -0.5)
    scores = scores.view(-1, last.shape[1], length)
    # Without a mask there is one token, at the end, which sees everything.
    if mask is not None:
        scores = scores + mask[0, :, -MOST_WATCHED:, :length].float()
    return scores.softmax(dim=-1).mean(dim=0)
