"""Tables of a card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Column", "facts", "table"]

Column = tuple[str, str]
"""A title and classes of its cells: ``name``, ``n`` for figures, ``w`` for bars, ``wide`` for what phones leave out."""


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Draw a table of cells that are HTML already."""
    head = "".join(f'<th class="{kind}" scope="col">{title}</th>' for title, kind in columns)
    body = "".join(f"<tr>{_cells(row, columns)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Sequence[str], columns: Sequence[Column]) -> str:
    return "".join(f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(row, columns, strict=True))


def facts(first: str, others: Iterable[str]) -> str:
    """Put the most important fact before the others."""
    rest = "".join(f"<span>{other}</span> " for other in others)
    return f'<div class="facts"><span class="big">{first}</span> {rest}</div>'
