"""Traces through the real memory store, with tensors as small as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from kvboost_rag.replay.bound import belady
from kvboost_rag.replay.documents import CHUNK_TOKENS, StoredDocument, make_documents
from kvboost_rag.replay.trace import Request, Trace, TraceOptions, make_trace
from kvboost_rag.store import EvictionScore, MemoryStore
from kvboost_rag.types import ChunkKV
from kvboost_rag.usage import Event

__all__ = ["METHODS", "format_table", "replay", "run_replay", "serve", "store_of"]

METHODS = ("lru", "lfu", "importance")
BUDGET_SHARE = 0.1
DRIFT_HALF_LIFE = 2_500.0

def run_replay(options: TraceOptions) -> dict[str, Any]:
    """Replay a trace with fixed popularities, and one with popularities that change.

    Parameters
    ----------
    options
        Of both traces, but for the change of popularity.

    Returns
    -------
    dict
        ``stationary`` and ``drift``, each from :data:`METHODS` and ``belady`` to the share of document tokens that were
        not computed again, and ``setup``.
    """
    half_life = options.popularity_half_life or DRIFT_HALF_LIFE
    traces = {
        "stationary": make_trace(replace(options, popularity_half_life=None)),
        "drift": make_trace(replace(options, popularity_half_life=half_life)),
    }
    setup = asdict(replace(options, popularity_half_life=half_life))
    # The lengths are drawn first, so that both traces have the same.
    documents = make_documents(traces["stationary"].tokens)
    shares = {name: _shares(trace, documents) for name, trace in traces.items()}
    return {**shares, "setup": {**setup, "chunk_tokens": CHUNK_TOKENS, "budget_share": BUDGET_SHARE}}


def _shares(trace: Trace, documents: Sequence[StoredDocument]) -> dict[str, float]:
    budget = int(trace.tokens.sum() * BUDGET_SHARE)
    shares = {method: replay(trace, documents, budget, method) for method in METHODS}
    return {**shares, "belady": belady(trace, budget)}


def replay(
    trace: Trace, documents: Sequence[StoredDocument], budget: int, eviction: str | EvictionScore
) -> float:
    """Share of document tokens that a memory store saves from being computed again.

    Parameters
    ----------
    trace
        The requests.
    documents
        The trace's, of :func:`kvboost_rag.replay.make_documents`.
    budget
        Tokens whose KV fits into the store.
    eviction
        As for :class:`kvboost_rag.store.MemoryStore`.

    Returns
    -------
    float
        0 to 1. Only tokens up to the first missing chunk of a document count.
    """
    store = store_of(documents, budget, eviction)
    saved = sum(serve(store, request, documents) for request in trace.requests)
    return saved / sum(int(trace.tokens[list(request.used)].sum()) for request in trace.requests)


def store_of(
    documents: Sequence[StoredDocument], budget: int, eviction: str | EvictionScore = "importance"
) -> MemoryStore:
    """Make a store with room for the KV of ``budget`` tokens."""
    one = documents[0].chunks[0]
    return MemoryStore(budget * one.nbytes // len(one.chunk.token_ids), eviction=eviction)


def serve(store: MemoryStore, request: Request, documents: Sequence[StoredDocument]) -> int:
    """Answer a request from a store, put what is missing, and return the document tokens that were there."""
    used = [documents[number] for number in request.used]
    store.note([p for number in request.retrieved for p in documents[number].prefixes], Event.RETRIEVED)
    store.note([p for document in used for p in document.prefixes], Event.USED)
    with store.hold():
        served = [_served(store, document) for document in used]
        store.note([c.chunk.key.prefix for chunks in served for c in chunks], Event.SERVED)
        for document, chunks in zip(used, served, strict=True):
            for entry in document.chunks[len(chunks) :]:
                store.put(entry)
    return sum(len(c.chunk.token_ids) for chunks in served for c in chunks)


def _served(store: MemoryStore, document: StoredDocument) -> Sequence[ChunkKV]:
    """Return a document's chunks up to the first one that is not stored."""
    for count, entry in enumerate(document.chunks):
        if store.get(entry.chunk.key.prefix, entry.chunk.token_ids) is None:
            return document.chunks[:count]
    return document.chunks


def format_table(result: dict[str, Any]) -> str:
    """Show what :func:`run_replay` returned."""
    setup = result["setup"]
    lines = [
        f"{setup['requests']} requests, each for {setup['used']} of {setup['retrieved']} retrieved documents out of "
        f"{setup['documents']} (Zipf exponent {setup['exponent']:g});",
        f"room for {setup['budget_share']:.0%} of their KV; drift: half of the popularities change in "
        f"{setup['popularity_half_life']:g} requests.",
        "Document tokens saved from being computed again:",
        "",
        f"{'eviction':<12}{'stationary':>11}{'of bound':>10}{'drift':>11}{'of bound':>10}",
    ]
    for method in (*METHODS, "belady"):
        cells = "".join(
            f"{result[name][method]:>11.1%}{result[name][method] / (result[name]['belady'] or 1):>10.1%}"
            for name in ("stationary", "drift")
        )
        lines.append(f"{method:<12}{cells}")
    return "\n".join(lines)
