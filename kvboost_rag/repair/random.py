"""A random choice: the control that shows whether a method's choice is worth anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.repair.base import Clues, Repair, positions_of, share_of
from kvboost_rag.types import Span

__all__ = ["RandomRepair"]


@dataclass(frozen=True)
class RandomRepair(Repair):
    """Recompute a random share of the reused tokens.

    Parameters
    ----------
    ratio
        Recompute ratio, 0 to 1.
    seed
        Of the choice; the same prompt layout gives the same choice.
    """

    ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a ratio outside 0 to 1."""
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"random needs a recompute ratio between 0 and 1, not {self.ratio}")

    @property
    def name(self) -> str:
        """Specification, as ``random:0.15``."""
        return f"random:{self.ratio!r}" + (f":seed={self.seed}" if self.seed else "")

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose tokens uniformly over all spans."""
        positions = positions_of(spans)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(positions.numel(), generator=generator)
        return positions[order[: share_of(self.ratio, positions.numel())]].sort().values
