"""CacheBlend: recompute the tokens whose keys or values deviate most at an early layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvboost_rag.model import Probe
from kvboost_rag.repair.base import Clues, Repair, best, check_seed, positions_of, share_of
from kvboost_rag.types import Span

__all__ = ["CacheBlend"]

# A quarter of the layers at 1.5, a quarter at 1, half at .75: on average 1.
_GRADUAL = (1.5, 1.0, 0.75)


@dataclass(frozen=True)
class CacheBlend(Repair):
    """All reused tokens run through the layers before the probe, the most deviating ones through the rest.

    The cost is about ``probe_layer / layers + ratio`` of a prefill. Method: CacheBlend, https://arxiv.org/abs/2405.16444.

    Parameters
    ----------
    ratio
        Share of the reused tokens that stay after the probe, 0 to 1.
    probe_layer
        The layer whose keys and values are compared; at least 1, for those of layer 0 depend on no other token.
    deviation
        What is compared: ``keys``, ``values`` or ``both`` (the sum of the two, each relative to its mean).
    gradual
        Narrow three times on the way down, from 1.5 to 0.75 of ``ratio``, as the paper does; on average ``ratio``.
    seed
        A method whose tokens are kept in any case, within the budget.
    """

    ratio: float = 0.15
    probe_layer: int = 1
    deviation: Literal["keys", "values", "both"] = "values"
    gradual: bool = False
    seed: Repair | None = None

    def __post_init__(self) -> None:
        """Refuse what can not be meant."""
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"cacheblend needs a recompute ratio between 0 and 1, not {self.ratio}")
        if self.probe_layer < 1:
            raise ValueError(f"cacheblend's probe_layer is {self.probe_layer}; it starts at 1")
        if self.deviation not in ("keys", "values", "both"):
            raise ValueError(f"cacheblend's deviation is 'keys', 'values' or 'both', not {self.deviation!r}")
        check_seed(self.seed, "cacheblend")

    @property
    def name(self) -> str:
        """Specification, as ``selective:16+cacheblend:0.15:probe_layer=2``."""
        text = f"{self.seed.name}+" if self.seed else ""
        text += f"cacheblend:{self.ratio!r}"
        for option, default in (("probe_layer", 1), ("deviation", "values"), ("gradual", False)):
            value = getattr(self, option)
            text += f":{option}={str(value).lower()}" if value != default else ""
        return text

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose every reused token: the probe decides."""
        return positions_of(spans)

    def probe_layers(self, layers: int) -> Sequence[int]:
        """Name the probe layer, and two later ones when gradual."""
        if self.ratio == 1.0:
            return ()
        if self.probe_layer >= layers:
            raise ValueError(f"cacheblend's probe_layer is {self.probe_layer}, but the model has {layers} layers")
        steps = (0, layers // 4, layers // 2) if self.gradual else (0,)
        return sorted({min(layers - 1, self.probe_layer + step) for step in steps})

    def narrow(self, probe: Probe, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Keep the tokens that deviate most, the seed's before all others."""
        total = sum(span.tokens for span in spans)
        first = None
        if self.seed is not None:
            wanted = self.seed.select(spans, clues).to(probe.positions.device)
            first = torch.isin(probe.positions, wanted)
        return best(self._score(probe), share_of(self._share_at(probe), total), first)

    def _share_at(self, probe: Probe) -> float:
        if not self.gradual:
            return self.ratio
        step = self.probe_layers(probe.layers).index(probe.layer)
        return min(1.0, self.ratio * _GRADUAL[step])

    def _score(self, probe: Probe) -> Tensor:
        keys = _distance(probe.new_keys, probe.old_keys)
        values = _distance(probe.new_values, probe.old_values)
        if self.deviation == "keys":
            return keys
        if self.deviation == "values":
            return values
        return keys / keys.mean().clamp_min(1e-12) + values / values.mean().clamp_min(1e-12)


def _distance(new: Tensor, old: Tensor) -> Tensor:
    """Squared distance per token, summed over heads: ``[tokens]`` from ``[kv_heads, tokens, head_dim]``."""
    return (new.float() - old.float()).square().sum(dim=(0, 2))
