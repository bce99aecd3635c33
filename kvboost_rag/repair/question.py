"""Question-guided repair: recompute what the question looks at, as far as it depends on its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.repair.base import Clues, Repair, best, check_seed, positions_of, share_of
from kvboost_rag.types import Span

__all__ = ["QuestionGuided"]

# How many layers below the depth are averaged.
_WATCHED_LAYERS = 3


@dataclass(frozen=True)
class QuestionGuided(Repair):
    """Recompute the reused tokens with the highest product of the question's attention and their sensitivity.

    The question runs through the layers below ``depth`` over the unrepaired documents, and its attention in the last
    three of them counts; that costs ``depth`` of a pass of the question. Question attention in the middle layers is the
    signal of ProphetKV and QCFuse; the product with the sensitivity, measured at index time, leaves out what the
    question looks at but what its context does not change.

    Parameters
    ----------
    ratio
        Share of the reused tokens that is recomputed, 0 to 1.
    depth
        Share of the layers that the question runs through beforehand, above 0 and below 1.
    weigh
        Whether sensitivity counts; False leaves the attention alone.
    seed
        A method whose tokens are recomputed in any case, within the ratio.
    """

    ratio: float = 0.05
    depth: float = 0.7
    weigh: bool = True
    seed: Repair | None = None

    def __post_init__(self) -> None:
        """Refuse what can not be meant."""
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"question needs a recompute ratio between 0 and 1, not {self.ratio}")
        if not 0.0 < self.depth < 1.0:
            raise ValueError(f"question's depth is {self.depth}; it is a share of the layers between 0 and 1")
        check_seed(self.seed, "question")

    @property
    def name(self) -> str:
        """Specification, as ``question:0.05:depth=0.5``."""
        text = (f"{self.seed.name}+" if self.seed else "") + f"question:{self.ratio!r}"
        text += f":depth={self.depth!r}" if self.depth != 0.7 else ""
        return text + ("" if self.weigh else ":weigh=false")

    def question_layers(self, layers: int) -> Sequence[int]:
        """Name the last layers below the depth; none where nothing is left to choose."""
        if self.ratio in (0.0, 1.0):
            return ()
        end = min(layers - 1, max(1, round(self.depth * layers)))
        return range(max(0, end - _WATCHED_LAYERS), end)

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose by attention and sensitivity, the seed's tokens before all others."""
        positions = positions_of(spans)
        count = share_of(self.ratio, positions.numel())
        if clues.attention is None:
            return positions[:count]
        score = clues.attention[positions]
        if self.weigh:
            score = score * clues.sensitivity[positions]
        first = None if self.seed is None else torch.isin(positions, self.seed.select(spans, clues))
        return positions[best(score, count, first)]
