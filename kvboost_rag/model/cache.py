"""A KV cache whose update scatters keys and values to the tokens' own places."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["KVCache", "ProbeReached"]


class ProbeReached(Exception):  # noqa: N818 - a signal, not an error
    """Ends a layer's forward at the point where it hands over its keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__("probe")
        self.keys = keys
        self.values = values


class _ScatterLayer(CacheLayerMixin):
    """One layer's view of a :class:`KVCache`."""

    is_sliding = False

    def __init__(self, owner: KVCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Without a cycle of references the memory is free as soon as nobody needs it.
        self._owner = weakref.ref(owner)
        self.index = index
        self.is_initialized = True

    @property
    def owner(self) -> KVCache:
        """The cache, which is alive while its layers are in use."""
        owner = self._owner()
        assert owner is not None
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the tokens to their slots and return everything visible."""
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the visible keys."""
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        """Tokens visible to attention."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.owner.capacity

    # transformers before 5.20 asks for the maximum under this name.
    get_max_cache_shape = get_max_length


class KVCache(Cache):
    """Preallocated keys and values of all layers; slot ``i`` always holds position ``i``.

    Parameters
    ----------
    keys, values
        ``[layers, batch, kv_heads, capacity, head_dim]``.

    Attributes
    ----------
    slots
        ``[tokens]`` int64: where the next update writes.
    length
        Slots below it are visible to attention.
    probe_layer
        The layer whose next update raises :class:`ProbeReached` in place of writing.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(layers=[_ScatterLayer(self, i) for i in range(keys.shape[0])])
        self.keys = keys
        self.values = values
        self.slots: Tensor = torch.empty(0, dtype=torch.long)
        self.length = 0
        self.probe_layer: int | None = None

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return int(self.keys.shape[3])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Scatter ``[batch, kv_heads, tokens, head_dim]`` of one layer to :attr:`slots`; return the visible part."""
        if layer == self.probe_layer:
            raise ProbeReached(keys, values)
        self.keys[layer].index_copy_(2, self.slots, keys)
        self.values[layer].index_copy_(2, self.slots, values)
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]

    def sliced(self, start: int, end: int) -> KVCache:
        """View of slots ``start`` to ``end``."""
        return KVCache(self.keys[:, :, :, start:end], self.values[:, :, :, start:end])

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer at ``slots``: ``[batch, kv_heads, tokens, head_dim]`` each."""
        return self.keys[layer].index_select(2, slots), self.values[layer].index_select(2, slots)
