"""The contract of a repair method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvboost_rag.model import Probe
from kvboost_rag.types import Span

__all__ = ["Repair", "share_of"]


class Repair(ABC):
    """Chooses which reused tokens are computed again; never runs the model itself.

    A method needs :meth:`select` alone. One that wants to know whom the question looks at names layers in
    :meth:`question_layers`; one that decides in the middle of the forward names layers in :meth:`probe_layers` and is
    handed their probe in :meth:`narrow`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The specification that :func:`kvboost_rag.repair.parse_repair` turns into this object."""

    @abstractmethod
    def select(self, spans: Sequence[Span], attention: Tensor | None = None) -> Tensor:
        """Choose the tokens that enter the forward.

        Parameters
        ----------
        spans
            Approximate spans only, in prompt order.
        attention
            ``[prompt tokens]`` float32: how much the end of the question looks at each token of the unrepaired prompt,
            mean over heads, :meth:`question_layers` and question tokens; None if the method names no such layers.

        Returns
        -------
        Tensor
            ``[tokens]`` int64 prompt positions inside the spans, ascending.
        """

    def question_layers(self, layers: int) -> Sequence[int]:
        """Layers (of ``layers``) at which the question's attention is wanted, ascending; the lower the cheaper."""
        return ()

    def probe_layers(self, layers: int) -> Sequence[int]:
        """Layers (of ``layers``) at whose input :meth:`narrow` is asked again, ascending."""
        return ()

    def narrow(self, probe: Probe, spans: Sequence[Span]) -> Tensor:
        """Choose which of the probed tokens stay in the forward.

        Parameters
        ----------
        probe
            Of the tokens of :meth:`select` that are still in the forward, and of no others.
        spans
            As given to :meth:`select`.

        Returns
        -------
        Tensor
            ``[tokens]`` int64 indexes into the probe's tokens, ascending.
        """
        return torch.arange(probe.positions.numel(), device=probe.positions.device)


def share_of(ratio: float, tokens: int) -> int:
    """Turn a recompute ratio into a number of tokens, rounded up so that a positive ratio repairs something."""
    return min(tokens, -int(-ratio * tokens // 1))
