"""Traces through the real memory store, with tensors as small as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from kvboost_rag.keys import chain, content_key, prefix_seed
from kvboost_rag.replay.bound import belady
from kvboost_rag.replay.trace import Trace, TraceOptions, make_trace
from kvboost_rag.store import EvictionScore, MemoryStore
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV
from kvboost_rag.usage import Event

__all__ = ["METHODS", "format_table", "replay", "run_replay"]

METHODS = ("lru", "lfu", "importance")
CHUNK_TOKENS = 256
BUDGET_SHARE = 0.1
DRIFT_HALF_LIFE = 2_500.0

_FINGERPRINT = "replay"


@dataclass(frozen=True, eq=False)
class _Stored:
    """A document as it is offered to a store."""

    chunks: tuple[ChunkKV, ...]
    prefixes: tuple[str, ...]


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
    shares = {name: _shares(trace) for name, trace in traces.items()}
    return {**shares, "setup": {**setup, "chunk_tokens": CHUNK_TOKENS, "budget_share": BUDGET_SHARE}}


def _shares(trace: Trace) -> dict[str, float]:
    budget = int(trace.tokens.sum() * BUDGET_SHARE)
    shares = {method: replay(trace, budget, method) for method in METHODS}
    return {**shares, "belady": belady(trace, budget)}


def replay(trace: Trace, budget: int, eviction: str | EvictionScore) -> float:
    """Share of document tokens that a memory store saves from being computed again.

    Parameters
    ----------
    trace
        The requests.
    budget
        Tokens whose KV fits into the store.
    eviction
        As for :class:`kvboost_rag.store.MemoryStore`.

    Returns
    -------
    float
        0 to 1. Only tokens up to the first missing chunk of a document count.
    """
    documents = _documents(trace)
    one = documents[0].chunks[0]
    store = MemoryStore(budget * one.nbytes // len(one.chunk.token_ids), eviction=eviction)
    saved = total = 0
    for request in trace.requests:
        used = [documents[number] for number in request.used]
        store.note([p for number in request.retrieved for p in documents[number].prefixes], Event.RETRIEVED)
        store.note([p for document in used for p in document.prefixes], Event.USED)
        with store.hold():
            served = [_served(store, document) for document in used]
            store.note([c.chunk.key.prefix for chunks in served for c in chunks], Event.SERVED)
            for document, chunks in zip(used, served, strict=True):
                for entry in document.chunks[len(chunks) :]:
                    store.put(entry)
        saved += sum(len(c.chunk.token_ids) for chunks in served for c in chunks)
        total += int(trace.tokens[list(request.used)].sum())
    return saved / total


def _served(store: MemoryStore, document: _Stored) -> Sequence[ChunkKV]:
    """Return a document's chunks up to the first one that is not stored."""
    for count, entry in enumerate(document.chunks):
        if store.get(entry.chunk.key.prefix, entry.chunk.token_ids) is None:
            return document.chunks[:count]
    return document.chunks


def _documents(trace: Trace) -> list[_Stored]:
    """Make each document of tokens that no other has."""
    ids = np.arange(trace.tokens.sum())
    kv = torch.zeros(1, 1, CHUNK_TOKENS, 1)
    starts = np.cumsum(trace.tokens) - trace.tokens
    return [
        _stored(str(number), ids[start : start + tokens], kv)
        for number, (start, tokens) in enumerate(zip(starts, trace.tokens, strict=True))
    ]


def _stored(name: str, ids: np.ndarray[Any, np.dtype[np.int64]], kv: torch.Tensor) -> _Stored:
    key, chunks = prefix_seed(_FINGERPRINT), []
    for index, start in enumerate(range(0, len(ids), CHUNK_TOKENS)):
        part = ids[start : start + CHUNK_TOKENS]
        key = chain(key, part)
        # All chunks share one tensor's memory; the store counts each as its own, which is what matters here.
        own = kv[:, :, : len(part)]
        chunk = Chunk(ChunkKey(key, content_key(_FINGERPRINT, part)), name, index, part)
        chunks.append(ChunkKV(chunk, own, own, own[0, 0, :, 0]))
    return _Stored(tuple(chunks), tuple(entry.chunk.key.prefix for entry in chunks))


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
