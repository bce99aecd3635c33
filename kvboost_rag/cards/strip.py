"""The strip: where the KV of each prompt token came from, drawn as text and as bars."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby

from kvboost_rag.types import Span, SpanKind

__all__ = ["LETTERS", "Run", "bar", "cells", "legend", "strip"]

LETTERS = {SpanKind.EXACT: "=", SpanKind.APPROXIMATE: "~", SpanKind.RECOMPUTED: "R", SpanKind.COMPUTED: "C"}

# A letter needs about this share of a bar's width.
_LETTER_SHARE = 0.05

Run = tuple[SpanKind, int]
"""A kind, and how many tokens in a row are of it."""


def strip(spans: Sequence[Span], width: int = 72) -> str:
    """Draw the prompt as a line: ``=`` exact, ``~`` approximate, ``R`` recomputed, ``C`` computed.

    Every cell shows the kind that has most of its tokens.
    """
    total = sum(span.tokens for span in spans)
    width = min(width, total)
    borders = [cell * total // width for cell in range(width + 1)] if width else []
    weights = [dict.fromkeys(SpanKind, 0) for _ in range(width)]
    for span in spans:
        for cell in range(bisect_right(borders, span.start) - 1, width):
            if borders[cell] >= span.end:
                break
            weights[cell][span.kind] += min(borders[cell + 1], span.end) - max(borders[cell], span.start)
    return "".join(LETTERS[max(own, key=own.__getitem__)] for own in weights)


def cells(spans: Sequence[Span], most: int) -> list[Run]:
    """Reduce adjacent spans to at most ``most`` runs.

    Where there are more, the tokens are dealt out to ``most`` cells so that each kind keeps its share of the width:
    what a cell takes too much of one kind, the next ones take less (error diffusion).
    """
    runs = list(_runs((span.kind, span.tokens) for span in spans))
    if len(runs) <= most:
        return runs
    total = sum(tokens for _, tokens in runs)
    owed = dict.fromkeys(SpanKind, 0.0)
    drawn, queue, left = [], iter(runs), runs[0]
    next(queue)
    for cell in range(most):
        width = (cell + 1) * total // most - cell * total // most
        left = _owe(owed, left, queue, width)
        kind = max(owed, key=owed.__getitem__)
        owed[kind] -= width
        drawn.append((kind, width))
    return list(_runs(drawn))


def _owe(owed: dict[SpanKind, float], left: Run, queue: Iterator[Run], width: int) -> Run:
    """Add the next ``width`` tokens to what is owed; return what is left of the last run."""
    kind, tokens = left
    while width >= tokens:
        owed[kind] += tokens
        width -= tokens
        following = next(queue, None)
        if following is None:
            return kind, 0
        kind, tokens = following
    owed[kind] += width
    return kind, tokens - width


def _runs(parts: Iterator[Run] | Sequence[Run]) -> Iterator[Run]:
    """Join neighbours of one kind."""
    for kind, group in groupby(parts, key=lambda part: part[0]):
        yield kind, sum(tokens for _, tokens in group)


def bar(spans: Sequence[Span], most: int, total: int) -> str:
    """Draw spans as one bar; letters where ``total`` tokens of width leave room for them."""
    parts = []
    for kind, tokens in cells(spans, most):
        lettered = " l" if tokens > _LETTER_SHARE * total else ""
        parts.append(f'<i class="{kind.value}{lettered}" style="flex:{tokens} 1 0"></i>')
    return f'<div class="bar">{"".join(parts)}</div>'


def legend(counts: Sequence[Run]) -> str:
    """Explain patterns, letters and heights, with the tokens of each kind."""
    items = " ".join(
        f'<span><i class="{kind.value}"></i>{LETTERS[kind]} {kind.value} {tokens}</span>' for kind, tokens in counts
    )
    return f'<div class="legend">{items}</div>'
