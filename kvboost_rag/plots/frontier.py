"""Quality against speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_rag.bench import BASELINES
from kvboost_rag.plots.style import COLOURS, Plot, family, look, styled

__all__ = ["frontier"]


def frontier(summary: Mapping[str, Mapping[str, Any]], title: str) -> Plot:
    """Draw KL and F1 of every measured method against its TTFT.

    Parameters
    ----------
    summary
        As :func:`kvboost_rag.bench.run_bench` returns it.
    title
        Model and data.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """
    with styled(2, width=10.0, height=4.2) as (figure, (left, right)):
        from matplotlib.ticker import LogLocator, NullFormatter

        for name in dict.fromkeys(family(method) for method in summary if method not in BASELINES):
            own = [row for method, row in summary.items() if family(method) == name]
            rows = sorted((row["ttft_ratio"], row["kl"], row["f1"]) for row in own)
            ttft, kl, f1 = zip(*rows, strict=True)
            colour, marker = look(name)
            for axes, values in ((left, kl), (right, f1)):
                axes.plot(ttft, values, color=colour, marker=marker, linestyle=":", linewidth=1, label=name)
        right.axhline(summary["full"]["f1"], color=COLOURS["black"], linewidth=1, label="full prefill")
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        left.yaxis.set_major_formatter("{x:.2g}")
        left.yaxis.set_minor_formatter(NullFormatter())
        left.set_ylabel("KL to full prefill, nats a token")
        right.set_ylabel("token F1 against the right answers")
        for axes in (left, right):
            axes.set_xlabel("time to the first token, full prefill = 1")
            axes.set_xlim(left=0)
        left.legend()
        figure.suptitle(title)
    return Plot(figure)
