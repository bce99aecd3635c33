"""The first tokens of every piece: where a document encoded elsewhere deviates most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.repair.base import Clues, Repair
from kvboost_rag.types import Span

__all__ = ["Selective"]


@dataclass(frozen=True)
class Selective(Repair):
    """Recompute the first ``tokens`` tokens after every seam.

    The idea is LegoLink of EPIC (https://arxiv.org/abs/2410.15332): a piece's first tokens act as its own attention
    sink unless they are computed again behind the real history.

    Parameters
    ----------
    tokens
        How many tokens of each piece whose history differs; pieces that are exact are left alone.
    """

    tokens: int = 16

    def __post_init__(self) -> None:
        """Refuse a count below zero."""
        if self.tokens < 0:
            raise ValueError(f"selective needs a number of tokens >= 0, not {self.tokens}")

    @property
    def name(self) -> str:
        """Specification, as ``selective:16``."""
        return f"selective:{self.tokens}"

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose the head of each span."""
        heads = [torch.arange(s.start, min(s.end, s.start + self.tokens)) for s in spans]
        return torch.cat(heads) if heads else torch.empty(0, dtype=torch.long)
