"""How far the KV of a prompt is from full prefill's, token by token and layer by layer."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Literal

from kvboost_rag.deviation import Deviation
from kvboost_rag.plots.style import COLOURS, Plot, styled
from kvboost_rag.types import SpanKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["deviation"]

# Less than a hundredth is not worth a colour.
_LOWEST, _HIGHEST = 1e-2, 1.0
_MARKS = {SpanKind.RECOMPUTED: ("orange", "///", "recomputed"), SpanKind.COMPUTED: ("red", "", "computed")}


def deviation(measured: Deviation, title: str, *, of: Literal["keys", "values"] = "values") -> Plot:
    """Draw a heatmap, token by layer; bright is far off, black is less than a hundredth.

    Parameters
    ----------
    measured
        As :meth:`kvboost_rag.KVBoostEngine.deviation` returns it.
    title
        Which repair.
    of
        Whose deviation.
    """
    figures = measured.values if of == "values" else measured.keys
    with styled(width=9.0, height=3.9) as (figure, (axes,)):
        from matplotlib.colors import LogNorm

        axes.grid(visible=False)
        image = axes.imshow(
            figures.clamp_min(_LOWEST).numpy(), aspect="auto", origin="lower", cmap="inferno",
            norm=LogNorm(_LOWEST, _HIGHEST), interpolation="nearest",
        )  # fmt: skip
        axes.set_xlabel("token of the prompt")
        axes.set_ylabel("layer")
        _mark(axes, measured)
        figure.colorbar(image, ax=axes, label=f"deviation of the {of}, share of their length", extend="both")
        figure.suptitle(title)
    return Plot(figure)


def _mark(axes: Axes, measured: Deviation) -> None:
    """Name the documents above the picture, and show below it what was computed in the prompt."""
    layers, tokens = measured.values.shape
    for name, group in groupby(measured.spans, key=lambda span: span.document_id):
        spans = list(group)
        if name is not None:
            axes.axvline(spans[0].start - 0.5, color="white", linewidth=0.8)
            place = ((spans[0].start + spans[-1].end) / 2, layers - 0.5)
            axes.annotate(name, place, xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    for kind, (colour, hatch, word) in _MARKS.items():
        ranges = [(s.start - 0.5, s.tokens) for s in measured.spans if s.kind is kind]
        if ranges:
            axes.broken_barh(
                ranges, (-2.6, 1.8), facecolors=COLOURS[colour], hatch=hatch, edgecolor="black", linewidth=0.4,
                label=word,
            )  # fmt: skip
    axes.set_xlim(-0.5, tokens - 0.5)
    axes.set_ylim(-2.9, layers - 0.5)
    axes.set_yticks(range(0, layers, max(1, layers // 6)))
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2, handlelength=1.2)
