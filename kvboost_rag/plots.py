"""Pictures of measurements; needs the extra ``plots`` (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvboost_rag.bench import BASELINES

__all__ = ["frontier", "require"]

# Okabe and Ito; the marker tells the families apart without colour.
_STYLES = {
    "none": ("#000000", "X"),
    "random": ("#999999", "v"),
    "selective": ("#0072b2", "s"),
    "cacheblend": ("#e69f00", "D"),
    "question": ("#cc79a7", "^"),
    "sensitive": ("#009e73", "o"),
    "selective+sensitive": ("#56b4e9", "P"),
    "auto": ("#d55e00", "*"),
}
_OTHER = ("#666666", "x")


def require(path: Path) -> None:
    """See that a plot can be drawn and written, before anything is measured for it.

    Raises
    ------
    ImportError
        If matplotlib is missing; names the remedy.
    ValueError
        If the file is neither PNG nor SVG, or its folder does not exist.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot {path} is neither .png nor .svg; name it so")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of the plot {path} does not exist; make it, or choose another one")
    if find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib; pip install 'kvboost-rag[plots]', or leave --plot out")


def frontier(summary: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw KL and F1 of every measured method against its TTFT.

    Parameters
    ----------
    summary
        As :func:`kvboost_rag.bench.run_bench` returns it.
    title
        Model and data.
    path
        A PNG or SVG file.

    Raises
    ------
    ImportError, ValueError
        As :func:`require`.
    """
    require(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(_family(method) for method in summary if method not in BASELINES):
        rows = sorted((r["ttft_ratio"], r["kl"], r["f1"]) for method, r in summary.items() if _family(method) == name)
        ttft, kl, f1 = zip(*rows, strict=True)
        colour, marker = _STYLES.get(name, _OTHER)
        for axes, values in ((left, kl), (right, f1)):
            axes.plot(ttft, values, color=colour, marker=marker, linestyle=":", linewidth=1, label=name)
    right.axhline(summary["full"]["f1"], color="#000000", linewidth=1, label="full prefill")
    left.set_yscale("log")
    left.set_ylabel("KL to full prefill, nats a token")
    right.set_ylabel("token F1 against the right answers")
    for axes in (left, right):
        axes.set_xlabel("TTFT, full prefill = 1")
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _family(method: str) -> str:
    """Name the methods without their numbers, as ``selective+sensitive``."""
    return "+".join(part.split(":")[0] for part in method.split("+"))
