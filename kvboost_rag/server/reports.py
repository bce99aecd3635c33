"""What an answer cost and where its KV came from, as the response says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_rag.report import Result
from kvboost_rag.types import SpanKind

__all__ = ["report_of", "usage_of"]


def usage_of(result: Result) -> dict[str, Any]:
    """Count tokens in OpenAI's form; cached are those whose KV was taken as it was stored."""
    report = result.report
    cached = report.tokens(SpanKind.EXACT) + report.tokens(SpanKind.APPROXIMATE)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def report_of(result: Result, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Describe an answer in plain values: tokens by kind, by document too, seconds, repair, fallback, notes."""
    report = result.report
    return {
        "tokens": {kind.value: report.tokens(kind) for kind in SpanKind},
        "documents": report.documents,
        "reused_share": report.reused_share,
        "repair": report.repair,
        "fallback": report.fallback,
        "ttft": report.ttft,
        "total": report.total,
        "stages": report.stages,
        "notes": list(notes),
    }
