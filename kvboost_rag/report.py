"""What a request tells about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import Tensor

from kvboost_rag.cards import answer_card, report_card, stats_card, strip
from kvboost_rag.types import Document, Span, SpanKind

__all__ = ["Located", "Report", "Result", "Scored", "Stats", "strip"]


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

    @property
    def documents(self) -> dict[str, dict[str, int]]:
        """Tokens of each document of the prompt, by kind."""
        counts: dict[str, dict[str, int]] = {}
        for span in self.spans:
            if span.document_id is not None:
                own = counts.setdefault(span.document_id, {kind.value: 0 for kind in SpanKind})
                own[span.kind.value] += span.tokens
        return counts

    def __str__(self) -> str:
        """Return counts, times and strip in three lines."""
        counts = ", ".join(f"{self.tokens(kind)} {kind.value}" for kind in SpanKind)
        why = f"; fallback: {self.fallback}" if self.fallback else ""
        return (
            f"{self.prompt_tokens} prompt tokens: {counts} (repair {self.repair}{why})\n"
            f"TTFT {self.ttft * 1000:.0f} ms, total {self.total * 1000:.0f} ms\n[{strip(self.spans)}]"
        )

    def _repr_html_(self) -> str:
        """Draw counts, times and strip for notebooks."""
        return report_card(
            self.spans, ttft=self.ttft, total=self.total, repair=self.repair, fallback=self.fallback, stages=self.stages
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
        """Draw answer and report for notebooks."""
        return answer_card(self.text, self.finish_reason, self.completion_tokens, self.report._repr_html_())


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
    shared_hits
        Chunks that were read from the tier that machines share.
    evictions
        Chunks that left memory because others took their place.
    """

    documents: int
    document_tokens: int
    chunks: int
    store_bytes: int
    prefix_bytes: int
    disk_bytes: int
    requests: int
    tokens: dict[str, int]
    shared_hits: int = 0
    evictions: int = 0

    def _repr_html_(self) -> str:
        """Draw the counters for notebooks."""
        counters = asdict(self)
        return stats_card(counters, counters.pop("tokens"))
