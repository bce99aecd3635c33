"""Time to the first token: how it grows, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import median

from kvboost_rag.bench import TimedPrompt
from kvboost_rag.plots.style import COLOURS, Plot, label, look, styled
from kvboost_rag.report import Report

__all__ = ["stages", "ttft_by_tokens"]

_LOOKS = (
    ("blue", ""), ("sky", "///"), ("orange", "xxx"), ("green", "..."), ("pink", "\\\\\\"), ("red", "++"),
    ("grey", "oo"),
)  # fmt: skip
# Thinner than this share of the longest bar, a stage is not seen.
_SEEN = 0.004
_REST = "all else"


def ttft_by_tokens(measured: Sequence[TimedPrompt], title: str) -> Plot:
    """Draw TTFT against the documents' tokens, a line for each method.

    Parameters
    ----------
    measured
        As :func:`kvboost_rag.bench.time_prompts` returns it; several of one method and size count by their median.
    title
        Model and machine.
    """
    with styled() as (figure, (axes,)):
        for method in dict.fromkeys(point.method for point in measured):
            tokens, seconds = _medians([point for point in measured if point.method == method])
            colour, marker = look(method)
            axes.plot(tokens, seconds, color=colour, marker=marker, label=label(method))
        axes.set_xlabel("tokens of the documents in the prompt")
        axes.set_ylabel("time to the first token, s")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.suptitle(title)
    return Plot(figure)


def _medians(points: Sequence[TimedPrompt]) -> tuple[list[float], list[float]]:
    by_count = [[p for p in points if p.documents == count] for count in sorted({p.documents for p in points})]
    return (
        [median(p.document_tokens for p in group) for group in by_count],
        [median(p.seconds for p in group) for group in by_count],
    )


def stages(reports: Mapping[str, Report], title: str) -> Plot:
    """Draw where the time to the first token goes, one stacked bar for each report.

    Parameters
    ----------
    reports
        Name in the picture to report; the first is drawn on top.
    title
        What was asked.
    """
    with styled(height=1.6 + 0.45 * len(reports)) as (figure, (axes,)):
        left = dict.fromkeys(reports, 0.0)
        for (stage, times), (colour, hatch) in zip(_parts(reports).items(), cycle(_LOOKS)):
            axes.barh(
                list(reports), times, left=list(left.values()), height=0.6, label=stage, color=COLOURS[colour],
                hatch=hatch, edgecolor="black", linewidth=0.6,
            )  # fmt: skip
            left = {name: start + time for (name, start), time in zip(left.items(), times, strict=True)}
        for name, end in left.items():
            axes.annotate(f"{end:.0f} ms", (end, name), xytext=(4, 0), textcoords="offset points", va="center")
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time to the first token, ms")
        figure.legend(loc="outside lower center", ncols=4)
        figure.suptitle(title)
    return Plot(figure)


def _parts(reports: Mapping[str, Report]) -> dict[str, list[float]]:
    """Give the milliseconds of each stage in each report, the longest stage first, those too short to see as one."""
    names = dict.fromkeys(stage for report in reports.values() for stage in report.stages)
    times = {name: [1000 * report.stages.get(name, 0.0) for report in reports.values()] for name in names}
    least = _SEEN * 1000 * max(report.ttft for report in reports.values())
    seen = {name: row for name, row in times.items() if max(row) >= least}
    rest = [sum(row[i] for name, row in times.items() if name not in seen) for i in range(len(reports))]
    return dict(sorted(seen.items(), key=lambda item: -max(item[1]))) | {_REST: rest}
