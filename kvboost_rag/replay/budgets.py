"""Hit rates of eviction methods over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost_rag.replay.bound import belady
from kvboost_rag.replay.documents import make_documents
from kvboost_rag.replay.run import METHODS, replay
from kvboost_rag.replay.trace import TraceOptions, make_trace

__all__ = ["HitRates", "hit_rates"]


@dataclass(frozen=True)
class HitRates:
    """Shares of document tokens that need not be computed.

    Parameters
    ----------
    budget_shares
        Budgets as shares of the KV of all documents, 0 to 1.
    rates
        For each eviction method, and ``belady`` (a bound that knows the future), the hit rate at every budget, 0 to 1.
    """

    budget_shares: tuple[float, ...]
    rates: dict[str, tuple[float, ...]]


def hit_rates(
    options: TraceOptions, budget_shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.4),
    methods: Sequence[str] = METHODS,
) -> HitRates:  # fmt: skip
    """Replay one trace with every budget and eviction method.

    Parameters
    ----------
    options
        Of the trace.
    budget_shares
        Above 0, at most 1.
    methods
        As for :class:`kvboost_rag.store.MemoryStore`.

    Raises
    ------
    ValueError
        For a budget outside its range.
    """
    if not budget_shares or not all(0.0 < share <= 1.0 for share in budget_shares):
        raise ValueError(f"budget_shares are {list(budget_shares)}; give shares above 0 and up to 1")
    trace = make_trace(options)
    documents = make_documents(trace.tokens)
    budgets = [max(1, int(trace.tokens.sum() * share)) for share in budget_shares]
    rates = {method: tuple(replay(trace, documents, budget, method) for budget in budgets) for method in methods}
    rates["belady"] = tuple(belady(trace, budget) for budget in budgets)
    return HitRates(tuple(budget_shares), rates)
