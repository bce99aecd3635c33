"""Text of unknown origin and length, made safe for a page."""

from __future__ import annotations

from html import escape

__all__ = ["milliseconds", "safe", "size"]


def safe(text: str, limit: int) -> str:
    """Escape a text, and cut it after ``limit`` characters with a word about what is left out."""
    left_out = len(text) - limit
    shown = text if left_out <= 0 else f"{text[:limit]}… ({left_out:,} more characters)"
    # A lone surrogate, which a cut answer may end with, can not be written to a notebook.
    return escape(shown.encode("utf-8", "replace").decode(), quote=True)


def milliseconds(seconds: float) -> str:
    """Show a time as people read it: three digits at most below a second."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def size(nbytes: int) -> str:
    """Show bytes in the largest unit that they fill."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"
