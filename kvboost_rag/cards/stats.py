"""Card of an engine's counters."""

from __future__ import annotations

from collections.abc import Mapping

from kvboost_rag.cards.strip import bar, legend
from kvboost_rag.cards.style import card
from kvboost_rag.cards.tables import facts, table
from kvboost_rag.cards.text import size
from kvboost_rag.types import Span, SpanKind

__all__ = ["stats_card"]


_KEPT = (
    ("documents, in memory", "store_bytes"),
    ("documents, on disk", "disk_bytes"),
    ("earlier prompts, in memory", "prefix_bytes"),
)


def stats_card(counters: Mapping[str, int], tokens: Mapping[str, int]) -> str:
    """Draw what :class:`kvboost_rag.Stats` holds.

    Parameters
    ----------
    counters
        ``documents``, ``document_tokens``, ``chunks``, ``store_bytes``, ``prefix_bytes``, ``disk_bytes``, ``requests``.
    tokens
        Prompt tokens by kind, over all requests.
    """
    first = f"{counters['documents']} documents"
    others = [f"{counters['document_tokens']:,} tokens", f"{counters['chunks']} chunks stored"]
    kept = table((("KV of", ""), ("takes", "n")), [(name, size(counters[key])) for name, key in _KEPT])
    return card([facts(first, others), kept, *_served(counters["requests"], tokens)])


def _served(requests: int, tokens: Mapping[str, int]) -> list[str]:
    total = sum(tokens.values())
    if not total:
        return ['<p class="soft" style="margin:8px 0 0">no prompt answered yet</p>']
    counts = [(kind, tokens[kind.value]) for kind in SpanKind]
    drawn, start = [], 0
    for kind, count in counts:
        if count:
            drawn.append(Span(start, start + count, kind))
        start += count
    words = ", ".join(f"{count} {kind.value}" for kind, count in counts)
    return [
        f'<p style="margin:10px 0 4px">{requests} prompts answered, {total:,} prompt tokens</p>',
        f'<div role="img" aria-label="{words}">{bar(drawn, len(SpanKind), total)}</div>',
        legend(counts),
    ]
