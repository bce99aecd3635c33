"""A plan to one KV cache: everything that is reused, rotated to its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from kvboost_rag.model import KVCache, ModelRunner, Tables
from kvboost_rag.prefix import PrefixHit
from kvboost_rag.quantize import dequantize, dequantize_into
from kvboost_rag.types import Placement, Plan

__all__ = ["Assembler"]

# Numbers that are worked on at a time: few enough to stay in a processor's cache.
_BLOCK = 1 << 20


class Assembler:
    """Places stored KV in a fresh cache.

    Parameters
    ----------
    runner
        Allocates the cache and owns the rotary tables.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rotation = runner.architecture.rotation
        self._tables = self._rotation.tables(0, 1)

    @torch.inference_mode()
    def assemble(self, plan: Plan, hit: PrefixHit | None, capacity: int) -> KVCache:
        """Build the cache that the repair forward completes.

        Parameters
        ----------
        plan
            What goes where.
        hit
            Source of the first ``plan.prefix_tokens`` tokens.
        capacity
            Slots of the new cache: prompt and answer, so that decoding never grows it.

        Returns
        -------
        KVCache
            Slots of computed spans are not defined yet.
        """
        cache = self._runner.request_cache(capacity)
        if hit is not None:
            self._copy_prefix(cache, hit.prefix.cache, plan.prefix_tokens)
        for placement in plan.placements:
            self._place(cache, placement)
        return cache

    @staticmethod
    def _copy_prefix(cache: KVCache, source: KVCache, tokens: int) -> None:
        cache.keys[:, :, :, :tokens] = source.keys[:, :, :, :tokens]
        cache.values[:, :, :, :tokens] = source.values[:, :, :, :tokens]

    def _place(self, cache: KVCache, placement: Placement) -> None:
        begin, start, end = placement.position, placement.start, placement.end
        there = slice(begin, begin + end - start)
        cos, sin = (table[:, there] for table in self._tables_up_to(there.stop))
        keys, values = (x.to(cache.keys.device) for x in (placement.entry.keys, placement.entry.values))
        for layers in _blocks(keys.shape):
            free = dequantize(keys[layers], start, end, torch.float32)
            self._rotation.rotate_into(cache.keys[layers, 0, :, there], free, (cos, sin), layers)
            dequantize_into(cache.values[layers, 0, :, there], values[layers], start, end)

    def _tables_up_to(self, length: int) -> Tables:
        if self._tables[0].shape[1] < length:
            # Twice as far as needed, so that longer and longer prompts do not each build the table anew.
            self._tables = self._rotation.tables(0, min(2 * length, self._rotation.limit or 2 * length))
        return self._tables


def _blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Cut ``[layers, kv_heads, tokens, head_dim]`` into runs of layers."""
    step = max(1, _BLOCK // prod(shape[1:]))
    for first in range(0, shape[0], step):
        yield slice(first, first + step)
