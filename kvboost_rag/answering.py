"""A prompt to a session that is ready to decode: the request-time half of the engine, stage after stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_rag.assemble import Assembler
from kvboost_rag.compose import Composer
from kvboost_rag.errors import ContextWindowError
from kvboost_rag.model import ModelRunner, PlainSession
from kvboost_rag.plan import Planner
from kvboost_rag.prefill import prefill
from kvboost_rag.prefix import Prefix, PrefixCache
from kvboost_rag.prompt import Prompt, Renderer
from kvboost_rag.registry import Registry
from kvboost_rag.repair import Repair
from kvboost_rag.report import Report
from kvboost_rag.session import PlainAnswer, ReusingAnswer
from kvboost_rag.types import Document, Piece, Span, SpanKind, TokenIds
from kvboost_rag.usage import Event

__all__ = ["Asked", "Clock", "PlainPath", "Request", "ReusePath", "Session", "compose_request"]

Session = PlainAnswer | ReusingAnswer


class Clock:
    """Seconds of each stage since the call.

    Parameters
    ----------
    timeout
        Seconds that the call may take; None for no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._start = self._last = time.perf_counter()
        self._timeout = timeout
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """End a stage."""
        now = time.perf_counter()
        self.stages[stage] = now - self._last
        self._last = now

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._start

    def check(self) -> None:
        """Raise TimeoutError if the call takes too long."""
        if self._timeout is not None and self.elapsed() > self._timeout:
            raise TimeoutError(
                f"the answer took more than timeout={self._timeout} seconds; pass a larger timeout, a smaller "
                "max_tokens or fewer documents"
            )


@dataclass(frozen=True, eq=False)
class Asked:
    """What a caller asks.

    Parameters
    ----------
    prompt, documents, options
        As for :meth:`kvboost_rag.KVBoostEngine.stream`.
    repair
        The method.
    reuse
        Whether stored KV may be used.
    max_tokens
        Slots for the answer.
    """

    prompt: Prompt
    documents: Sequence[Document | str]
    options: Mapping[str, Any]
    repair: Repair
    reuse: bool
    max_tokens: int


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt in pieces."""

    pieces: list[Piece]
    asked: Asked
    clock: Clock

    @property
    def token_ids(self) -> TokenIds:
        """The whole prompt."""
        return np.concatenate([piece.token_ids for piece in self.pieces])

    def is_current(self, registry: Registry) -> bool:
        """Whether every document of the prompt is still known, with the same text."""
        for piece in self.pieces:
            if piece.chunks and piece.document_id is not None:
                known = registry.get(piece.document_id)
                if known is None or known.chunks != piece.chunks:
                    return False
        return True

    def report(self, session: Session, ttft: float) -> Report:
        """Describe a session that this request opened."""
        reused = isinstance(session, ReusingAnswer)
        return Report(
            spans=session.spans,
            repair=self.asked.repair.description if reused else "off",
            ttft=ttft,
            total=self.clock.elapsed(),
            stages=dict(self.clock.stages),
            fallback=session.fallback,
        )


def compose_request(
    asked: Asked, clock: Clock, registry: Registry, renderer: Renderer, composer: Composer, window: int | None
) -> Request:
    """Render a prompt, find its documents and tokenise it.

    Raises
    ------
    ValueError
        If a document id is not known, or the prompt is empty or malformed.
    ContextWindowError
        If prompt and answer exceed ``window`` tokens.
    """
    documents = [_resolved(d, registry) for d in asked.documents]
    segments = renderer.render(asked.prompt, documents, asked.options)
    clock.lap("render")
    pieces = composer.pieces(segments, raw=renderer.is_raw(asked.prompt, documents))
    clock.lap("locate")
    tokens = sum(len(piece.token_ids) for piece in pieces)
    if window is not None and tokens + asked.max_tokens > window:
        raise ContextWindowError(
            f"the prompt has {tokens} tokens and max_tokens is {asked.max_tokens}, but the model's context window is "
            f"{window}; pass fewer or shorter documents, or a smaller max_tokens"
        )
    return Request(pieces, asked, clock)


def _resolved(document: Document | str, registry: Registry) -> Document:
    if isinstance(document, Document):
        return document
    known = registry.get(document)
    if known is None:
        raise ValueError(f"document {document!r} is not known; add it first, or pass a Document")
    return known.document


class ReusePath:
    """Opens sessions over stored KV.

    Parameters
    ----------
    runner, planner, prefixes
        The stages and what they look things up in.
    """

    def __init__(self, runner: ModelRunner, planner: Planner, prefixes: PrefixCache) -> None:
        self._runner = runner
        self._planner = planner
        self._prefixes = prefixes
        self._assembler = Assembler(runner)

    def open(self, request: Request) -> ReusingAnswer:
        """Plan, assemble and prefill."""
        repair, store = request.asked.repair, self._planner.store
        hit = self._prefixes.match(request.token_ids, repair.effect)
        store.note(_chunks_in(request.pieces), Event.USED)
        with store.hold():
            plan = self._planner.plan(request.pieces, hit)
            request.clock.lap("plan")
            cache = self._assembler.assemble(plan, hit, len(plan.token_ids) + request.asked.max_tokens)
            request.clock.lap("assemble")
        store.note((placement.entry.chunk.key.prefix for placement in plan.placements), Event.SERVED)
        done = prefill(self._runner, plan, cache, repair)
        request.clock.lap("prefill")
        return ReusingAnswer(self._runner, cache, done.logits, done.spans, plan.token_ids, done.fallback)

    def keep(self, session: ReusingAnswer, request: Request) -> None:
        """Leave a session's KV to later prompts that begin alike."""
        self._prefixes.put(Prefix(session.token_ids, session.cache, session.all_spans, request.asked.repair.effect))


def _chunks_in(pieces: Sequence[Piece]) -> Iterator[str]:
    """Prefix keys of the chunks that stand in a prompt, whole or in part."""
    for piece in pieces:
        start = 0
        for chunk in piece.chunks:
            if start < len(piece.token_ids):
                yield chunk.key.prefix
            start += len(chunk.token_ids)


class PlainPath:
    """Opens sessions without any reuse.

    Parameters
    ----------
    model
        Any causal language model of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def open(self, request: Request, why: str) -> PlainAnswer:
        """Prefill as transformers does, and report why."""
        spans, start = [], 0
        for piece in request.pieces:
            end = start + len(piece.token_ids)
            spans.append(Span(start, end, SpanKind.COMPUTED, piece.document_id, why))
            start = end
        session = PlainAnswer(PlainSession(self._model), torch.from_numpy(request.token_ids), tuple(spans), why)
        request.clock.lap("prefill")
        return session
