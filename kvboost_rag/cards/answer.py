"""Cards of an answer and of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice

from kvboost_rag.cards.strip import Run, bar, legend, strip
from kvboost_rag.cards.style import card
from kvboost_rag.cards.tables import facts, table
from kvboost_rag.cards.text import milliseconds, safe
from kvboost_rag.types import Span, SpanKind

__all__ = ["answer_card", "report_card"]

_ANSWER_CHARACTERS = 4000
_NAME_CHARACTERS = 80
_REASON_CHARACTERS = 160
# With these limits the largest card stays far below 200 KB.
_CELLS = 400
_PIECE_CELLS = 60
_ROWS = 24
_COLUMNS = (
    ("", "n"), ("part of the prompt", "name"), ("tokens", "n"), ("where its KV came from", "w"), ("why", "wide soft")
)  # fmt: skip

Part = tuple[str | None, list[Span]]
"""Neighbouring spans of one document, or of the text between two."""


def report_card(
    spans: Sequence[Span], *, ttft: float, total: float, repair: str, fallback: str, stages: Mapping[str, float]
) -> str:
    """Draw what :class:`kvboost_rag.Report` holds."""
    return card(_report(spans, ttft, total, repair, fallback, stages))


def answer_card(text: str, finish_reason: str, tokens: int, report: str) -> str:
    """Draw an answer above the card of its report."""
    cut = ", cut at <code>max_tokens</code>" if finish_reason == "length" else ""
    answer = f"<blockquote>{safe(text.strip(), _ANSWER_CHARACTERS) or '(no text)'}</blockquote>"
    return card([f'<p class="soft">answer, {tokens} tokens{cut}</p>', answer]) + report


def _report(
    spans: Sequence[Span], ttft: float, total: float, repair: str, fallback: str, stages: Mapping[str, float]
) -> Iterator[str]:
    counts = [(kind, sum(s.tokens for s in spans if s.kind is kind)) for kind in SpanKind]
    everything = sum(tokens for _, tokens in counts)
    reused = sum(tokens for kind, tokens in counts if kind in (SpanKind.EXACT, SpanKind.APPROXIMATE))
    yield facts(
        f"first token after {milliseconds(ttft)}",
        [
            f"{everything} prompt tokens, {reused / max(1, everything):.0%} reused",
            f"repair {safe(repair, _NAME_CHARACTERS)}",
            f"whole answer {milliseconds(total)}",
        ],
    )
    if fallback:
        yield f"<p>Not reused: {safe(fallback, _REASON_CHARACTERS)}.</p>"
    pieces = _pieces(spans)
    yield _whole(pieces, everything, counts)
    yield legend(counts)
    yield _parts(pieces)
    yield _stages(stages)


def _pieces(spans: Sequence[Span]) -> list[Part]:
    """Group neighbours of one document."""
    return [(name, list(group)) for name, group in groupby(spans, key=lambda span: span.document_id)]


def _whole(pieces: Sequence[Part], everything: int, counts: Sequence[Run]) -> str:
    spans = [span for _, group in pieces for span in group]
    words = ", ".join(f"{tokens} {kind.value}" for kind, tokens in counts)
    opening = f'<div role="img" aria-label="prompt tokens in order: {words}" class="whole'
    plain = f'<pre class="plain">[{strip(spans)}]</pre>'
    if len(pieces) > 2 * _ROWS:
        return f'{opening} dense"><div style="flex:1">{bar(spans, _CELLS, everything)}</div></div>{plain}'
    drawn, number = "", 0
    for name, group in pieces:
        tokens = sum(span.tokens for span in group)
        number += name is not None
        cell = bar(group, max(8, _CELLS * tokens // everything), everything)
        label = number if name is not None else ""
        drawn += f'<div class="piece" data-number="{label}" style="flex:{tokens} 1 0">{cell}</div>'
    return f'{opening}">{drawn}</div>{plain}'


def _parts(pieces: Sequence[Part]) -> str:
    longest = max((sum(s.tokens for s in group) for _, group in pieces), default=1)
    rows = list(islice(_rows(pieces, longest), _ROWS))
    more = sum(name is not None for name, _ in pieces) - sum(bool(row[0]) for row in rows)
    note = f'<p class="soft">{more} more documents are not listed.</p>' if more > 0 else ""
    return table(_COLUMNS, rows) + note


def _rows(pieces: Sequence[Part], longest: int) -> Iterator[Sequence[str]]:
    """Make a row of each document and of the text before and behind them; what separates documents is left out."""
    number = 0
    for place, (name, group) in enumerate(pieces):
        if name is None and 0 < place < len(pieces) - 1:
            continue
        number += name is not None
        tokens = sum(span.tokens for span in group)
        drawn = f'<div style="width:{max(1.0, 100 * tokens / longest):.1f}%">{bar(group, _PIECE_CELLS, longest)}</div>'
        reasons = "; ".join(dict.fromkeys(span.reason for span in group if span.reason))
        shown = safe(name, _NAME_CHARACTERS) if name is not None else _text_name(place, len(pieces))
        yield (str(number) if name is not None else "", shown, str(tokens), drawn, safe(reasons, _REASON_CHARACTERS))


def _text_name(place: int, pieces: int) -> str:
    if pieces == 1:
        return "the whole prompt"
    return "head, before the documents" if place == 0 else "question"


def _stages(stages: Mapping[str, float]) -> str:
    worth = sorted(((s, name) for name, s in stages.items() if s >= 5e-5), reverse=True)
    shown = " · ".join(f"{safe(name, 40)} {milliseconds(seconds)}" for seconds, name in worth[:8])
    return f'<p class="soft" style="margin:8px 0 0">time to the first token: {shown}</p>' if shown else ""
