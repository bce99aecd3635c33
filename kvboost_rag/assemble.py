"""A plan to one KV cache: everything that is reused, rotated to its place."""

from __future__ import annotations

import torch
from torch import Tensor

from kvboost_rag.model import KVCache, ModelRunner
from kvboost_rag.prefix import PrefixHit
from kvboost_rag.rope import rotate_into
from kvboost_rag.types import Placement, Plan

__all__ = ["Assembler"]


class Assembler:
    """Places stored KV in a fresh cache.

    Parameters
    ----------
    runner
        Allocates the cache and owns the rotary tables.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._cos, self._sin = runner.architecture.rotary_tables(0, 1)

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
        begin, own = placement.position, slice(placement.start, placement.end)
        end = begin + placement.end - placement.start
        cos, sin = self._tables(end)
        device = cache.keys.device
        keys = placement.entry.keys[:, :, own].to(device)
        rotate_into(cache.keys[:, 0, :, begin:end], keys, cos[begin:end], sin[begin:end])
        cache.values[:, 0, :, begin:end] = placement.entry.values[:, :, own].to(device)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        if len(self._cos) < length:
            # Twice as far as needed, so that longer and longer prompts do not each build the table anew.
            self._cos, self._sin = self._runner.architecture.rotary_tables(0, 2 * length)
        return self._cos, self._sin
