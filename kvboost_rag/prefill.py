"""The one forward of a request: repaired tokens, holes and the question together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.model import Chooser, KVCache, ModelRunner, Probe
from kvboost_rag.repair import Clues, Repair, Selective
from kvboost_rag.types import Plan, Span, SpanKind

__all__ = ["Prefilled", "prefill"]


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt whose KV is complete.

    Parameters
    ----------
    logits
        ``[vocabulary]`` float32, for the first token of the answer.
    spans
        The plan's spans with recomputed tokens told apart.
    fallback
        Why approximate tokens were all computed; empty otherwise.
    """

    logits: Tensor
    spans: tuple[Span, ...]
    fallback: str


def prefill(runner: ModelRunner, plan: Plan, cache: KVCache, repair: Repair) -> Prefilled:
    """Compute what the plan left open and what the repair chose, in place.

    Parameters
    ----------
    runner
        Runs the model.
    plan
        The prompt.
    cache
        As assembled from the plan.
    repair
        Chooses among the plan's repairable spans.
    """
    fallback = repair.declines(plan.repairable)
    if fallback:
        # With every token chosen and none narrowed away, this equals a full prefill.
        repair = Selective(len(plan.token_ids))
    clues = Clues(plan.sensitivity, _attention(runner, plan, cache, repair))
    chosen = repair.select(plan.repairable, clues)
    positions = torch.cat([chosen, _holes(plan)]).sort().values
    selection = _Selection(repair, plan, clues, chosen.to(runner.device))
    ids = torch.from_numpy(plan.token_ids)[positions]
    logits = runner.forward(
        ids.to(runner.device), positions.to(runner.device), cache, len(plan.token_ids), selection.choosers(runner)
    )
    return Prefilled(logits, tuple(_told_apart(plan.spans, selection.kept.cpu().numpy())), fallback)


def _holes(plan: Plan) -> Tensor:
    return torch.cat([torch.arange(s.start, s.end) for s in plan.computed])


def _attention(runner: ModelRunner, plan: Plan, cache: KVCache, repair: Repair) -> Tensor | None:
    """Run holes and question through the lower layers, if the repair wants to know whom the question looks at."""
    layers = repair.question_layers(runner.architecture.layers)
    if not layers or not plan.repairable:
        return None
    holes = _holes(plan)
    ids = torch.from_numpy(plan.token_ids)[holes]
    return runner.question_attention(
        ids.to(runner.device), holes.to(runner.device), cache, len(plan.token_ids), layers, plan.computed[-1].tokens
    ).cpu()


@dataclass(eq=False)
class _Selection:
    """Which repaired tokens are still in the forward."""

    repair: Repair
    plan: Plan
    clues: Clues
    kept: Tensor

    def choosers(self, runner: ModelRunner) -> Mapping[int, Chooser]:
        if not len(self.kept):
            return {}
        return {layer: self._choose for layer in self.repair.probe_layers(runner.architecture.layers)}

    def _choose(self, probe: Probe) -> Tensor:
        candidate = torch.isin(probe.positions, self.kept)
        indexes = candidate.nonzero()[:, 0]
        chosen = indexes[self.repair.narrow(probe.at(indexes), self.plan.repairable, self.clues)]
        self.kept = probe.positions[chosen]
        # Holes and the question always stay.
        return torch.cat([chosen, (~candidate).nonzero()[:, 0]]).sort().values


def _told_apart(spans: Sequence[Span], recomputed: np.ndarray) -> Iterator[Span]:
    """Cut approximate spans where recomputed runs begin and end."""
    for span in spans:
        inside = recomputed[(recomputed >= span.start) & (recomputed < span.end)]
        if span.kind is not SpanKind.APPROXIMATE or not len(inside):
            yield span
            continue
        flags = np.zeros(span.tokens, dtype=bool)
        flags[inside - span.start] = True
        edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), span.tokens]
        for a, b in zip(edges, edges[1:], strict=False):
            kind = SpanKind.RECOMPUTED if flags[a] else SpanKind.APPROXIMATE
            yield replace(span, start=span.start + a, end=span.start + b, kind=kind)
