"""A cache and an attention function for rows of a batch that each have a KV cache of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost_rag.model.attention import PASSED_OVER
from kvboost_rag.model.cache import KVCache

__all__ = ["RowsCache", "attention_by_row"]


class _RowsLayer(CacheLayerMixin):
    """One layer of all rows' caches; hands out a list in the place of a tensor, for :func:`_attend_by_row` alone."""

    is_sliding = False

    def __init__(self, longest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.longest = longest
        self.keys_seen: list[Tensor] = []
        self.values_seen: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Write ``[rows, kv_heads, 1, head_dim]`` to each row's last slot; return what each row sees."""
        for seen, new in ((self.keys_seen, key_states), (self.values_seen, value_states)):
            for i, own in enumerate(seen):
                own[:, :, -1:].copy_(new[i : i + 1])
        return self.keys_seen, self.values_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the visible keys."""
        return self.longest, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self.longest

    def get_max_length(self) -> int:
        """Tokens of the longest row."""
        return self.longest

    # transformers before 5.20 asks for the maximum under this name.
    get_max_cache_shape = get_max_length


class RowsCache(Cache):
    """The caches of all rows for one forward.

    Parameters
    ----------
    caches
        One for each row, batch size 1.
    positions
        Of each row's token, which is its last.
    windows
        Per layer, the width of its sliding window or None.
    """

    def __init__(self, caches: Sequence[KVCache], positions: Sequence[int], windows: Sequence[int | None]) -> None:
        layers = [_RowsLayer(max(positions) + 1) for _ in windows]
        super().__init__(layers=[*layers])
        for cache, position in zip(caches, positions, strict=True):
            keys, values = _seen(cache.keys, position, windows), _seen(cache.values, position, windows)
            for layer, own_keys, own_values in zip(layers, keys, values, strict=True):
                layer.keys_seen.append(own_keys)
                layer.values_seen.append(own_values)


def _seen(buffer: Tensor, position: int, windows: Sequence[int | None]) -> list[Tensor]:
    """Per layer, what the token at a position sees, itself last: ``[1, kv_heads, length, head_dim]``."""
    # All of its window is in the past, so a slice stands in for a mask.
    starts = {w: 0 if w is None else max(0, position + 1 - w) for w in set(windows)}
    views = {w: buffer[:, :, :, start : position + 1].unbind() for w, start in starts.items()}
    return [views[window][layer] for layer, window in enumerate(windows)]


@contextmanager
def attention_by_row(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend row by row for the length of one forward, by the implementation that it has."""
    config = model.config
    before = config._attn_implementation
    name = f"kvboost_rows_{before}"
    AttentionInterface.register(name, partial(_attend_by_row, before))
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = before


def _attend_by_row(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with ``query`` ``[rows, heads, 1, head_dim]`` to a ``[1, kv_heads, length, head_dim]`` of each row."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    unusual = any(v is not None and v is not False for name, v in kwargs.items() if name not in PASSED_OVER)
    if implementation == "sdpa" and not unusual and not dropout:
        attend = partial(_sdpa, scaling)
    else:
        # The mask is a placeholder: each row is given what it sees and nothing else.
        arguments = {"attention_mask": None, "dropout": dropout, "scaling": scaling, **kwargs}
        attend = partial(_as_the_model_does, _implementation(implementation, module), module, arguments)
    rows = [attend(query[i : i + 1], k, v) for i, (k, v) in enumerate(zip(key, value, strict=True))]
    return torch.cat(rows), None


def _sdpa(scaling: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # The heads of a group look at the same keys: as tokens of one head, they need no copies of these.
    grouped = query.reshape(1, key.shape[1], -1, query.shape[-1])
    return scaled_dot_product_attention(grouped, key, value, scale=scaling).reshape(1, 1, query.shape[1], -1)


def _as_the_model_does(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    arguments: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    return function(module, query, key, value, **arguments)[0]


def _implementation(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if name != "eager":
        return AttentionInterface()[name]  # type: ignore[no-any-return]
    # Every family has its own, with its soft caps and sinks.
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
