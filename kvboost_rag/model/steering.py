"""Forward pre-hooks that give each decoder layer its mask and, on demand, fewer tokens.

Narrowing is how CacheBlend (https://arxiv.org/abs/2405.16444) keeps its cost at a share of a prefill: all candidate
tokens run through the layers before the probe, the chosen ones through the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvboost_rag.model.attention import Watcher, block_ends
from kvboost_rag.model.cache import KVCache, ProbeReached
from kvboost_rag.model.masks import Columns, as_bias, visibility

__all__ = ["Chooser", "Halted", "Probe", "Steering", "steered"]


@dataclass(frozen=True, eq=False)
class Probe:
    """What a repair may look at in the middle of a forward.

    Parameters
    ----------
    layer, layers
        The layer whose keys and values these are, and how many the model has.
    positions
        ``[tokens]`` int64, prompt positions of the tokens still in the forward.
    new_keys, new_values
        ``[kv_heads, tokens, head_dim]``, as computed now, keys rotated.
    old_keys, old_values
        The same shape, as they stand in the cache.
    """

    layer: int
    layers: int
    positions: Tensor
    new_keys: Tensor
    new_values: Tensor
    old_keys: Tensor
    old_values: Tensor

    def at(self, indexes: Tensor) -> Probe:
        """Return the same probe of some of its tokens."""
        tensors = (self.new_keys, self.new_values, self.old_keys, self.old_values)
        return Probe(self.layer, self.layers, self.positions[indexes], *(t[:, indexes] for t in tensors))


Chooser = Callable[[Probe], Tensor]
"""Takes a probe, returns the ascending indexes (int64) into its tokens that stay in the forward."""


class Halted(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward at a layer's input."""


@dataclass(eq=False)
class Steering:
    """State of one steered forward.

    Parameters
    ----------
    cache
        The cache the forward reads and writes.
    positions, slots
        ``[tokens]`` int64 on the model's device.
    windows
        Per layer, the sliding window's width or None.
    mask_free
        Whether attention knows causality by itself (sdpa), so that the common shapes need no mask.
    dtype
        Of the masks.
    in_blocks
        Whether :mod:`kvboost_rag.model.attention` is in use and wants to know its blocks.
    choosers
        Layer -> who narrows the token set at its input.
    halt
        The layer at whose input the forward ends with :class:`Halted`.
    watch
        Layers whose attention is handed to ``watcher``.
    columns
        Of all slots below the cache's length, where a slot is not its own position.
    """

    cache: KVCache
    positions: Tensor
    slots: Tensor
    windows: Sequence[int | None]
    mask_free: bool
    dtype: torch.dtype
    in_blocks: bool
    choosers: Mapping[int, Chooser] = field(default_factory=dict)
    halt: int | None = None
    watch: frozenset[int] = frozenset()
    watcher: Watcher | None = None
    columns: Columns | None = None
    kept: Tensor | None = None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Point the cache at the first token set."""
        self._settle()

    def _settle(self) -> None:
        """Let cache, masks and attention follow a change of the token set."""
        self.cache.slots = self.slots
        self.masks.clear()
        self.ends = block_ends(self.slots)

    def mask(self, layer: int) -> Tensor | None:
        """Additive mask ``[1, 1, tokens, length]`` of a layer for the tokens still in the forward."""
        window = self.windows[layer]
        # Slots that are not their own positions may be fewer than the positions that they span.
        if window is not None and self.columns is None and window >= self.cache.length:
            window = None
        if window not in self.masks:
            self.masks[window] = self._build(window)
        return self.masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        tokens, length = self.slots.numel(), self.cache.length
        if self.columns is not None:
            seen = visibility(self.positions, self.columns.positions, window)
            return as_bias(seen, self.dtype, self.columns.bias)
        # The slots are ascending and distinct: as many tokens as slots is a plain causal forward, and one token
        # at the end sees everything.
        if self.mask_free and window is None and tokens == length:
            return None
        if self.mask_free and window is None and tokens == 1 and int(self.slots[0]) == length - 1:
            return None
        return as_bias(visibility(self.slots, torch.arange(length, device=self.slots.device), window), self.dtype)

    def narrow(self, layer: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Probe a layer and drop the tokens that its chooser does not keep; return the hidden states that stay."""
        keys, values = self._probe(layer, module, hidden, kwargs)
        old_keys, old_values = self.cache.read(layer, self.slots)
        probe = Probe(layer, len(self.windows), self.positions, keys[0], values[0], old_keys[0], old_values[0])
        keep = self.choosers[layer](probe)
        self.kept = keep if self.kept is None else self.kept[keep]
        self.positions, self.slots = self.positions[keep], self.slots[keep]
        self._settle()
        return hidden.index_select(1, keep)

    def _probe(
        self, layer: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Run a layer up to the point where it hands its keys and values to the cache, and no further."""
        self.cache.probe_layer = layer
        try:
            module.forward(hidden, **self.layer_arguments(layer, kwargs))
        except ProbeReached as reached:
            return reached.keys, reached.values
        finally:
            self.cache.probe_layer = None
        raise RuntimeError(f"layer {layer} never handed its keys to the cache")

    def layer_arguments(self, layer: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a layer, cut to the tokens still in the forward, with the layer's own mask."""
        out = dict(kwargs, attention_mask=self.mask(layer))
        if self.in_blocks:
            out["kvboost_ends"] = self.ends
        if layer in self.watch:
            out["kvboost_watcher"] = self.watcher
        if self.kept is None:
            return out
        if out.get("position_ids") is not None:
            out["position_ids"] = out["position_ids"][..., self.kept]
        if out.get("position_embeddings") is not None:
            cos, sin = out["position_embeddings"]
            out["position_embeddings"] = (cos[..., self.kept, :], sin[..., self.kept, :])
        return out


def _before_layer(
    layer: int, steering: Steering, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if layer == steering.halt:
        raise Halted
    hidden = args[0]
    if layer in steering.choosers:
        hidden = steering.narrow(layer, module, hidden, kwargs)
    return (hidden, *args[1:]), steering.layer_arguments(layer, kwargs)


@contextmanager
def steered(layers: nn.ModuleList, steering: Steering) -> Iterator[None]:
    """Install the pre-hooks for one forward and remove them whatever happens."""
    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            hook = partial(_before_layer, i, steering)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
