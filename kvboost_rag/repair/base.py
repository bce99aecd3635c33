"""The contract of a repair method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost_rag.model import Probe
from kvboost_rag.types import Span

__all__ = ["Clues", "Repair", "best", "check_seed", "positions_of", "share_of"]


@dataclass(frozen=True, eq=False)
class Clues:
    """What is known of a prompt's tokens before the forward.

    Parameters
    ----------
    sensitivity
        ``[prompt tokens]`` float32, measured at index time: how much a token's KV depends on its document's context.
    attention
        ``[prompt tokens]`` float32: how much the end of the question looks at each token of the unrepaired prompt,
        mean over heads, layers and question tokens; None unless the method names :meth:`Repair.question_layers`.
    """

    sensitivity: Tensor
    attention: Tensor | None = None


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

    @property
    def effect(self) -> str:
        """Equal for methods that leave the same KV behind."""
        return self.name

    @property
    def description(self) -> str:
        """What reports call it."""
        return self.name

    def declines(self, spans: Sequence[Span]) -> str:
        """Say why these spans had better be computed anew, all of them; empty to repair them.

        Parameters
        ----------
        spans
            As for :meth:`select`.
        """
        return ""

    @abstractmethod
    def select(self, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose the tokens that enter the forward.

        Parameters
        ----------
        spans
            Approximate spans only, in prompt order.
        clues
            What is known of the prompt's tokens.

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

    def narrow(self, probe: Probe, spans: Sequence[Span], clues: Clues) -> Tensor:
        """Choose which of the probed tokens stay in the forward.

        Parameters
        ----------
        probe
            Of the tokens of :meth:`select` that are still in the forward, and of no others.
        spans, clues
            As given to :meth:`select`.

        Returns
        -------
        Tensor
            ``[tokens]`` int64 indexes into the probe's tokens, ascending.
        """
        return torch.arange(probe.positions.numel(), device=probe.positions.device)


def share_of(ratio: float, tokens: int) -> int:
    """Turn a recompute ratio into a number of tokens, rounded up so that a positive ratio repairs something."""
    # Without rounding, 7 % of 100 tokens would be 8.
    return min(tokens, math.ceil(round(ratio * tokens, 6)))


def positions_of(spans: Sequence[Span]) -> Tensor:
    """Prompt positions inside spans, ``[tokens]`` int64."""
    return torch.cat([torch.arange(s.start, s.end) for s in spans]) if spans else torch.empty(0, dtype=torch.long)


def best(score: Tensor, count: int, first: Tensor | None = None) -> Tensor:
    """Choose the tokens with the highest scores.

    Parameters
    ----------
    score
        ``[tokens]`` float.
    count
        How many.
    first
        ``[tokens]`` bool: these before all others; among them, too, the best ones first.

    Returns
    -------
    Tensor
        ``[count]`` int64 indexes, ascending.
    """
    if first is not None:
        score = score.argsort().argsort() + score.numel() * first
    return score.topk(min(count, score.numel())).indices.sort().values


def check_seed(seed: Repair | None, name: str) -> None:
    """Refuse a seed that does not know its tokens before the forward.

    Raises
    ------
    ValueError
        Naming the remedy.
    """
    if seed is not None and (type(seed).narrow is not Repair.narrow or seed.question_layers(1 << 10)):
        raise ValueError(f"{seed.name} decides inside the forward and can not seed {name}; use selective")
