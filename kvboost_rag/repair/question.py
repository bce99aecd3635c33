"""Question-guided repair: recompute what the question looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.repair.base import Repair, share_of
from kvboost_rag.types import Span

__all__ = ["QuestionGuided"]

# How many layers below the depth are averaged.
_WATCHED_LAYERS = 3


@dataclass(frozen=True)
class QuestionGuided(Repair):
    """Recompute the reused tokens that the end of the question attends to most.

    The question runs ahead through the layers below ``depth`` over the unrepaired documents; its attention in the last
    three of them chooses the tokens, which then run up to the same layer, and all go on together. So the look ahead
    costs nothing; but below ``depth`` the question itself has seen unrepaired documents only. The signal is that of
    ProphetKV and QCFuse (question attention in the middle layers); they pay a pass of the question for it.

    Parameters
    ----------
    ratio
        Share of the reused tokens that is recomputed, 0 to 1.
    depth
        Share of the layers that the question runs ahead through, above 0 and below 1.
    first
        The first so many tokens of each piece are recomputed in any case, within the ratio.
    """

    ratio: float = 0.05
    depth: float = 0.6
    first: int = 0

    def __post_init__(self) -> None:
        """Refuse what can not be meant."""
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"question needs a recompute ratio between 0 and 1, not {self.ratio}")
        if not 0.0 < self.depth < 1.0:
            raise ValueError(f"question's depth is {self.depth}; it is a share of the layers between 0 and 1")
        if self.first < 0:
            raise ValueError(f"question's first is {self.first}; it is a number of tokens, at least 0")

    @property
    def name(self) -> str:
        """Specification, as ``question:0.05:depth=0.5``."""
        text = f"question:{self.ratio!r}"
        text += f":depth={self.depth!r}" if self.depth != 0.6 else ""
        return text + (f":first={self.first}" if self.first else "")

    def question_layers(self, layers: int) -> Sequence[int]:
        """Name the last layers below the depth; none where nothing is left to choose."""
        if self.ratio in (0.0, 1.0):
            return ()
        end = min(layers - 1, max(1, round(self.depth * layers)))
        return range(max(0, end - _WATCHED_LAYERS), end)

    def select(self, spans: Sequence[Span], attention: Tensor | None = None) -> Tensor:
        """Choose the most attended tokens, each piece's first ones before all others."""
        runs = [torch.arange(s.start, s.end) for s in spans]
        positions = torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)
        count = share_of(self.ratio, positions.numel())
        if attention is None or count in (0, positions.numel()):
            return positions[:count]
        score = attention.cpu()[positions]
        if self.first:
            heads = torch.cat([torch.arange(s.tokens) < self.first for s in spans])
            score = score.masked_fill(heads, torch.inf)
        return positions[score.topk(count).indices].sort().values
