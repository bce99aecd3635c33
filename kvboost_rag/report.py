"""What a request tells about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from torch import Tensor

from kvboost_rag.types import Document, Span, SpanKind

__all__ = ["Located", "Report", "Result", "Scored", "Stats", "strip"]

_LETTERS = {SpanKind.EXACT: "=", SpanKind.APPROXIMATE: "~", SpanKind.RECOMPUTED: "R", SpanKind.COMPUTED: "C"}
# Colour-blind safe (Okabe and Ito); the letter tells the kinds apart without colour.
_COLOURS = {
    SpanKind.EXACT: "#009e73",
    SpanKind.APPROXIMATE: "#56b4e9",
    SpanKind.RECOMPUTED: "#e69f00",
    SpanKind.COMPUTED: "#d55e00",
}


@dataclass(frozen=True)
class Report:
    """Where the KV of a prompt came from and what it cost.

    Parameters
    ----------
    spans
        Cover the prompt in order.
    repair
        Specification of the repair, or ``off`` when nothing was to be reused.
    ttft
        Seconds from the call to the first token: rendering, locating, loading, rotating, repair and sampling included.
    stages
        Seconds of each stage before the first token.
    total
        Seconds from the call to the end of the answer.
    fallback
        Why tokens were computed although their KV could have been reused; empty otherwise.
    """

    spans: tuple[Span, ...]
    repair: str
    ttft: float
    total: float
    stages: dict[str, float] = field(default_factory=dict)
    fallback: str = ""

    def tokens(self, kind: SpanKind) -> int:
        """Prompt tokens of one kind."""
        return sum(span.tokens for span in self.spans if span.kind is kind)

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return sum(span.tokens for span in self.spans)

    @property
    def reused_share(self) -> float:
        """Share of prompt tokens whose KV was taken as it was stored, 0 to 1."""
        return (self.tokens(SpanKind.EXACT) + self.tokens(SpanKind.APPROXIMATE)) / max(1, self.prompt_tokens)

    @property
    def recomputed_share(self) -> float:
        """Share of the tokens with other history that were recomputed, 0 to 1."""
        recomputed = self.tokens(SpanKind.RECOMPUTED)
        return recomputed / max(1, recomputed + self.tokens(SpanKind.APPROXIMATE))

    def __str__(self) -> str:
        """Return counts, times and strip in three lines."""
        counts = ", ".join(f"{self.tokens(kind)} {kind.value}" for kind in SpanKind)
        why = f"; fallback: {self.fallback}" if self.fallback else ""
        return (
            f"{self.prompt_tokens} prompt tokens: {counts} (repair {self.repair}{why})\n"
            f"TTFT {self.ttft * 1000:.0f} ms, total {self.total * 1000:.0f} ms\n[{strip(self.spans)}]"
        )

    def _repr_html_(self) -> str:
        """Coloured strip of the prompt for notebooks."""
        bars = "".join(_bar(span, self.prompt_tokens) for span in self.spans)
        legend = " &nbsp; ".join(
            f'<span style="color:{_COLOURS[k]}">&#9632;</span> {_LETTERS[k]} {k.value} {self.tokens(k)}'
            for k in SpanKind
        )
        head = escape(str(self).splitlines()[1])
        return (
            f'<div style="font-family:sans-serif;font-size:13px"><div>{head}</div>'
            f'<div style="display:flex;height:22px;width:100%;margin:4px 0">{bars}</div><div>{legend}</div></div>'
        )


@dataclass(frozen=True)
class Result:
    """An answer.

    Parameters
    ----------
    text
        The answer, without the prompt and without a stop string.
    token_ids
        Its tokens.
    finish_reason
        ``stop`` (end of text or a stop string) or ``length``.
    report
        Where the KV came from and what it cost.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: Report

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.report.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)

    def __str__(self) -> str:
        """Return the answer."""
        return self.text

    def _repr_html_(self) -> str:
        """Answer and strip for notebooks."""
        return f"<div><pre style='white-space:pre-wrap'>{escape(self.text)}</pre>{self.report._repr_html_()}</div>"


@dataclass(frozen=True)
class Located:
    """A known document found in a text.

    Parameters
    ----------
    document
        As it was added.
    start, end
        Character offsets in the text.
    complete
        Whether it is there whole, or cut at its end.
    """

    document: Document
    start: int
    end: int
    complete: bool


@dataclass(frozen=True, eq=False)
class Scored:
    """Logits of a given answer.

    Parameters
    ----------
    logits
        ``[tokens, vocabulary]`` float32: row ``i`` is the model's opinion before it sees answer token ``i``.
    report
        Where the prompt's KV came from.
    greedy
        The model's own greedy answer of as many tokens, if it was asked for.
    """

    logits: Tensor
    report: Report
    greedy: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stats:
    """Counters of an engine.

    Parameters
    ----------
    documents, document_tokens, chunks
        What is indexed.
    store_bytes, prefix_bytes, disk_bytes
        Memory of the documents' KV and of earlier prompts; files of the documents' KV.
    requests
        Prompts answered.
    tokens
        Prompt tokens by kind, over all requests.
    """

    documents: int
    document_tokens: int
    chunks: int
    store_bytes: int
    prefix_bytes: int
    disk_bytes: int
    requests: int
    tokens: dict[str, int]


def strip(spans: Sequence[Span], width: int = 72) -> str:
    """Draw the prompt as a line: ``=`` exact, ``~`` approximate, ``R`` recomputed, ``C`` computed.

    Every cell shows the kind that has most of its tokens.
    """
    total = sum(span.tokens for span in spans)
    cells = []
    for cell in range(min(width, total)):
        low, high = cell * total // min(width, total), (cell + 1) * total // min(width, total)
        weights = dict.fromkeys(SpanKind, 0)
        for span in spans:
            weights[span.kind] += max(0, min(high, span.end) - max(low, span.start))
        cells.append(_LETTERS[max(weights, key=weights.__getitem__)])
    return "".join(cells)


def _bar(span: Span, total: int) -> str:
    share = 100 * span.tokens / max(1, total)
    title = escape(f"{span.document_id or 'text'}: {span.tokens} {span.kind.value} {span.reason}".strip(), quote=True)
    letter = _LETTERS[span.kind] if share > 1.5 else ""
    return (
        f'<div title="{title}" style="flex:0 0 {share:.3f}%;background:{_COLOURS[span.kind]};overflow:hidden;'
        f'text-align:center;color:#fff">{letter}</div>'
    )
