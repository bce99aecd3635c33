"""The repair that a measured policy chooses for a quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvboost_rag.model import Probe
from kvboost_rag.repair.base import Clues, Repair
from kvboost_rag.types import Span

__all__ = ["Auto"]

# So few reused tokens save less than loading and rotating them costs.
_WORTH_WHILE = 16


@dataclass(frozen=True)
class Auto(Repair):
    """Whatever reaches a quality at the lowest cost; a full prefill where nothing does, or where reuse would not pay.

    Parameters
    ----------
    quality
        ``floor``, ``standard``, ``safe``, or a KL in nats a token.
    chosen
        The method that the policy names for it; of no account if it is not ``reached``.
    reached
        Whether any method was measured to reach the quality.
    """

    quality: str
    chosen: Repair
    reached: bool = True

    @property
    def name(self) -> str:
        """Specification, as ``auto:standard``."""
        return f"auto:{self.quality}"

    @property
    def effect(self) -> str:
        """Specification of the chosen method, which alone decides about the KV."""
        return self.chosen.effect if self.reached else "full"

    @property
    def description(self) -> str:
        """Specification and what it stands for, as ``auto:standard = sensitive:0.08``."""
        return f"{self.name} = {self.chosen.description if self.reached else 'full prefill'}"

    def declines(self, spans: Sequence[Span]) -> str:
        """Decline where the quality is out of reach, or hardly anything could be reused."""
        tokens = sum(span.tokens for span in spans)
        if not tokens:
            return ""
        if not self.reached:
            return f"no repair was measured to reach {self.name}, so all tokens with another history were computed"
        if tokens < _WORTH_WHILE:
            return f"{tokens} tokens with another history were computed, for so few would not pay"
        return self.chosen.declines(spans)

    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose as the chosen method does."""
        return self.chosen.select(spans, clues)

    def question_layers(self, layers: int) -> Sequence[int]:
        """Name the chosen method's layers."""
        return self.chosen.question_layers(layers)

    def probe_layers(self, layers: int) -> Sequence[int]:
        """Name the chosen method's layers."""
        return self.chosen.probe_layers(layers)

    def narrow(self, probe: Probe, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Narrow as the chosen method does."""
        return self.chosen.narrow(probe, spans, clues)
