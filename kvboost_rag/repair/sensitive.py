"""Recompute the tokens that depend most on what stands before their document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.repair.base import Clues, Repair, best, check_seed, positions_of, share_of
from kvboost_rag.types import Span

__all__ = ["Sensitive"]


@dataclass(frozen=True)
class Sensitive(Repair):
    """Recompute the reused tokens with the highest sensitivity, which was measured at index time.

    The choice costs nothing at request time: no token runs that is not recomputed.

    Parameters
    ----------
    ratio
        Share of the reused tokens that is recomputed, 0 to 1.
    seed
        A method whose tokens are recomputed in any case, within the ratio.
    """

    ratio: float = 0.08
    seed: Repair | None = None

    def __post_init__(self) -> None:
        """Refuse what can not be meant."""
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"sensitive needs a recompute ratio between 0 and 1, not {self.ratio}")
        check_seed(self.seed, "sensitive")

    @property
    def name(self) -> str:
        """Specification, as ``selective:2+sensitive:0.08``."""
        return (f"{self.seed.name}+" if self.seed else "") + f"sensitive:{self.ratio!r}"

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose by sensitivity, the seed's tokens before all others."""
        positions = positions_of(spans)
        first = None if self.seed is None else torch.isin(positions, self.seed.select(spans, clues))
        return positions[best(clues.sensitivity[positions], share_of(self.ratio, positions.numel()), first)]
