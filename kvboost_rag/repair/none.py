"""No repair: reuse everything as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvboost_rag.repair.base import Clues, Repair
from kvboost_rag.types import Span

__all__ = ["NoRepair"]


class NoRepair(Repair):
    """The fastest, and the baseline that every other method has to beat."""

    @property
    def name(self) -> str:
        """Always ``none``."""
        return "none"

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose nothing."""
        return torch.empty(0, dtype=torch.long)
