"""What a budget saves."""

from __future__ import annotations

from kvboost_rag.plots.style import Plot, label, look, styled
from kvboost_rag.replay import HitRates

__all__ = ["hit_rate"]


def hit_rate(measured: HitRates, title: str) -> Plot:
    """Draw the share of document tokens that need not be computed against the memory budget.

    Parameters
    ----------
    measured
        As :func:`kvboost_rag.replay.hit_rates` returns it.
    title
        What was replayed.
    """
    with styled() as (figure, (axes,)):
        budgets = [100 * share for share in measured.budget_shares]
        for method, rates in measured.rates.items():
            colour, marker = look(method)
            line = "--" if method == "belady" else "-"
            axes.plot(budgets, [100 * r for r in rates], line, color=colour, marker=marker, label=label(method))
        axes.set_xlabel("budget, % of the KV of all documents")
        axes.set_ylabel("hit rate, % of document tokens")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 100)
        axes.legend(loc="lower right")
        figure.suptitle(title)
    return Plot(figure)
