"""Quality against speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvboost_rag.bench import BASELINES
from kvboost_rag.plots.style import COLOURS, Plot, family, look, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["frontier"]

Summary = Mapping[str, Mapping[str, Any]]


def frontier(summary: Summary, title: str, *, answers: bool = True) -> Plot:
    """Draw KL, and F1 beside it, of every measured method against its TTFT.

    Parameters
    ----------
    summary
        As :func:`kvboost_rag.bench.run_bench` returns it.
    title
        Model and data.
    answers
        Whether the samples had right answers. A calibration's own questions have none, and F1 says nothing there.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """
    size = (2, 10.0, 4.2) if answers else (1, 7.2, 4.2)
    with styled(size[0], width=size[1], height=size[2]) as (figure, panels):
        _draw_kl(panels[0], summary)
        if answers:
            _draw(panels[1], summary, "f1", "token F1 against the right answers")
            full = panels[1].axhline(summary["full"]["f1"], color=COLOURS["black"], linewidth=1, label="full prefill")
            panels[1].legend(handles=[full])
        figure.suptitle(title)
    return Plot(figure)


def _draw_kl(axes: Axes, summary: Summary) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    _draw(axes, summary, "kl", "KL to full prefill, nats a token")
    points = [(row["ttft_ratio"], row["kl"]) for method, row in summary.items() if method not in BASELINES]
    # Between two of them the cheaper one is the best that was measured.
    axes.plot(
        *zip(*_unbeaten(points), strict=True), color=COLOURS["grey"], linewidth=1.2, drawstyle="steps-post",
        label="frontier", zorder=1,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()


def _draw(axes: Axes, summary: Summary, figure: str, name: str) -> None:
    """Draw one figure of each method; methods that differ in numbers alone are joined by a line."""
    for kind in dict.fromkeys(family(method) for method in summary if method not in BASELINES):
        rows = [row for method, row in summary.items() if family(method) == kind]
        points = sorted((row["ttft_ratio"], row[figure]) for row in rows)
        colour, marker = look(kind)
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker=marker, linestyle=":", linewidth=1, label=kind)
    axes.set_xlabel("time to the first token, full prefill = 1")
    axes.set_ylabel(name)
    axes.set_xlim(left=0)


def _unbeaten(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep those that are nearer to full prefill than all that are as soon or sooner, the soonest first."""
    kept: list[tuple[float, float]] = []
    for ttft, kl in sorted(points):
        if not kept or kl < kept[-1][1]:
            kept.append((ttft, kl))
    return kept
