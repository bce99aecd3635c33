"""How much each token of a document depends on what stands before the document.

A token whose KV changes with the context is worth recomputing in a prompt, where the context is yet another one. This
is measured once, at index time, and costs nothing at request time, unlike the deviation that CacheBlend probes with
every request: the document runs through the lowest layers once more behind another context, and the values are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvboost_rag.model import KVCache, ModelRunner
from kvboost_rag.types import TokenIds

__all__ = ["SensitivityMeter"]

# The values of layers 1 and 2 rank tokens as well as those of half the layers did, for two layers' work.
_LAYER = 2


class SensitivityMeter:
    """Compares documents' values after the canonical context with those after another one.

    Parameters
    ----------
    runner
        Runs the model.
    other
        The other context, at least one token.
    """

    def __init__(self, runner: ModelRunner, other: TokenIds) -> None:
        self._runner = runner
        self._layer = min(_LAYER, runner.architecture.layers - 1)
        self._length = len(other)
        ids = torch.from_numpy(other).to(runner.device)
        slots = torch.arange(self._length, device=runner.device)
        self._context = runner.new_cache(self._length)
        runner.encode(ids[None], slots, slots, self._context, self._length)

    def measure(self, token_ids: Tensor, lengths: Sequence[int], values: Tensor) -> list[Tensor]:
        """Measure a batch of documents.

        Parameters
        ----------
        token_ids
            ``[batch, tokens]`` int64, padded at the end.
        lengths
            Tokens of each document without padding.
        values
            ``[layers, batch, kv_heads, tokens, head_dim]`` after the canonical context.

        Returns
        -------
        list[Tensor]
            ``[tokens]`` float32 for each document: squared change of the values relative to the document's mean
            squared value, mean over the layers; 0 where nothing depends on the context.
        """
        if not self._layer:
            return [torch.zeros(length) for length in lengths]
        end = self._length + token_ids.shape[1]
        slots = torch.arange(self._length, end, device=token_ids.device)
        other = self._runner.lower_values(token_ids, slots, self._cache(end, len(lengths)), end, self._layer)
        return [
            torch.stack([_change(o[row], values[1 + i, row], n) for i, o in enumerate(other)]).mean(dim=0).cpu()
            for row, n in enumerate(lengths)
        ]

    def _cache(self, capacity: int, batch: int) -> KVCache:
        cache = self._runner.new_cache(capacity, batch, self._layer + 1)
        cache.keys[:, :, :, : self._length] = self._context.keys[: self._layer + 1]
        cache.values[:, :, :, : self._length] = self._context.values[: self._layer + 1]
        return cache


def _change(one: Tensor, other: Tensor, tokens: int) -> Tensor:
    """Relative squared distance of ``[kv_heads, tokens, head_dim]``, a number for each of the first tokens."""
    one, other = one[:, :tokens].float(), other[:, :tokens].float()
    size = other.square().sum(dim=(0, 2)).mean().clamp_min(1e-12)
    return (one - other).square().sum(dim=(0, 2)) / size
