"""One style for all pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "Look", "Plot", "family", "label", "look", "require", "styled"]

Look = tuple[str, str]
"""A colour and a marker."""

# Okabe and Ito, told apart by colour-blind people; markers and hatches tell the same without colour. Orange and sky are
# too light for white paper: what has them gets a black edge.
COLOURS = {
    "black": "#000000", "grey": "#767676", "blue": "#0072b2", "orange": "#e69f00", "green": "#009e73",
    "pink": "#cc79a7", "sky": "#56b4e9", "red": "#d55e00",
}  # fmt: skip

_LOOKS: dict[str, Look] = {
    "full": (COLOURS["black"], "o"),
    "prefix-cache": (COLOURS["grey"], "v"),
    "none": (COLOURS["red"], "X"),
    "random": (COLOURS["grey"], "<"),
    "selective": (COLOURS["blue"], "s"),
    "cacheblend": (COLOURS["orange"], "D"),
    "question": (COLOURS["pink"], "^"),
    "sensitive": (COLOURS["green"], "o"),
    "selective+sensitive": (COLOURS["sky"], "P"),
    "selective+cacheblend": (COLOURS["orange"], "p"),
    "auto": (COLOURS["blue"], "*"),
    "importance": (COLOURS["green"], "o"),
    "lru": (COLOURS["orange"], "s"),
    "lfu": (COLOURS["blue"], "^"),
    "belady": (COLOURS["black"], "D"),
}
_OTHER: Look = (COLOURS["grey"], "x")
_LABELS = {
    "full": "full prefill", "prefix-cache": "prefix caching", "belady": "best possible (Belady's bound)"
}  # fmt: skip

_STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.linewidth": 0.4, "grid.color": "#c8c8c8", "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 9, "lines.markersize": 6, "lines.markeredgecolor": "black",
    "lines.markeredgewidth": 0.6, "figure.facecolor": "white", "savefig.facecolor": "white",
    "hatch.linewidth": 0.6,
}  # fmt: skip
_DPI = 110


@dataclass(frozen=True)
class Plot:
    """A drawn picture. Notebooks show it; :meth:`save` writes it; ``figure`` can be changed before.

    Parameters
    ----------
    figure
        Of matplotlib.
    """

    figure: Figure

    def save(self, path: str | Path) -> None:
        """Write it as PNG or SVG.

        Raises
        ------
        ValueError
            As :func:`require`.
        """
        path = Path(path)
        require(path)
        self.figure.savefig(path, dpi=_DPI)

    def _repr_png_(self) -> bytes:
        """Draw it for notebooks."""
        out = BytesIO()
        self.figure.savefig(out, format="png", dpi=_DPI)
        return out.getvalue()


def require(path: Path | None = None) -> None:
    """See that a plot can be drawn and written, before anything is measured for it.

    Raises
    ------
    ImportError
        If matplotlib is missing; names the remedy.
    ValueError
        If the file is neither PNG nor SVG, or its folder does not exist.
    """
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot {path} is neither .png nor .svg; name it so")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"the folder of the plot {path} does not exist; make it, or choose another one")
    if find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib; pip install 'kvboost-rag[plots]', or leave the plot out")


@contextmanager
def styled(columns: int = 1, *, width: float = 7.2, height: float = 3.8) -> Iterator[tuple[Figure, list[Axes]]]:
    """Give a figure with axes side by side, in inches; it is to be drawn on inside the ``with`` block."""
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])


def family(method: str) -> str:
    """Name a method without its numbers, as ``selective+sensitive``."""
    return "+".join(part.split(":")[0] for part in method.split("+"))


def look(method: str) -> Look:
    """Give the colour and marker of a method; methods that differ in numbers alone look alike."""
    return _LOOKS.get(family(method), _OTHER)


def label(method: str) -> str:
    """Name a method in a legend."""
    return _LABELS.get(method, method)
