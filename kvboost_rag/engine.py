"""The façade: the only file that knows the order of the stages."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.assemble import Assembler
from kvboost_rag.chunking import AdaptiveChunker, Chunker
from kvboost_rag.compose import Composer
from kvboost_rag.decode import Delta, Finish, decode
from kvboost_rag.encode import CanonicalContext, Encoder
from kvboost_rag.errors import ContextWindowError, EngineClosedError
from kvboost_rag.keys import prefix_seed
from kvboost_rag.loading import load_model
from kvboost_rag.model import PlainSession, check_support, fingerprint
from kvboost_rag.plan import Planner
from kvboost_rag.prefill import prefill
from kvboost_rag.prefix import Prefix, PrefixCache
from kvboost_rag.prompt import Layout, Prompt, Renderer
from kvboost_rag.registry import Registered, Registry
from kvboost_rag.repair import Repair, parse_repair
from kvboost_rag.report import Report, Result, Stats
from kvboost_rag.sampling import Sampling, as_stops
from kvboost_rag.session import PlainAnswer, ReusingAnswer
from kvboost_rag.store import ChunkStore, DiskStore, MemoryStore, TieredStore
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Chunk, ChunkKV, Document, Piece, Span, SpanKind, TokenIds

__all__ = ["KVBoostEngine", "Located", "Scored"]

logger = logging.getLogger("kvboost_rag")


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
    """

    logits: Tensor
    report: Report


@dataclass(frozen=True, eq=False)
class _Request:
    pieces: list[Piece]
    max_tokens: int
    repair: Repair
    reuse: bool
    clock: _Clock


class _Clock:
    """Seconds of each stage since the call."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage] = now - self._last
        self._last = now

    def elapsed(self) -> float:
        return time.perf_counter() - self._start


class KVBoostEngine:
    """Answers prompts over documents whose KV was computed once.

    Safe to use from several threads: forwards are run one at a time, streams may be interleaved.

    Parameters
    ----------
    model, tokenizer
        A loaded causal language model of transformers and its tokenizer.
    reuse
        ``"on"`` refuses a model whose KV can not be moved; ``"off"`` runs any model as transformers does.
    repair
        Which reused tokens are computed again: a specification as ``"cacheblend:0.15"``, or a :class:`Repair`.
    layout
        Places of documents that are handed over apart, and with them the canonical head.
    context_documents
        Generic texts that every document is encoded after, behind the head.
    chunker
        Chooses the chunks' boundaries.
    namespace
        Tenant; part of every key.
    cache_dir
        Folder in which KV outlives the process; None keeps it in memory alone.
    max_memory_bytes
        Budget of the documents' KV in memory; None for no limit.
    max_prefix_bytes
        Budget of the KV of earlier prompts, for conversations.

    Raises
    ------
    UnsupportedModelError
        If ``reuse="on"`` and the check at load fails.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reuse: Literal["on", "off"] = "on",
        repair: str | Repair = "cacheblend:0.15",
        layout: Layout | None = None,
        context_documents: Sequence[str] = (),
        chunker: Chunker | None = None,
        namespace: str = "",
        cache_dir: str | Path | None = None,
        max_memory_bytes: int | None = None,
        max_prefix_bytes: int = 1 << 30,
    ) -> None:
        if reuse not in ("on", "off"):
            raise ValueError(f"reuse is 'on' or 'off', not {reuse!r}")
        self.model = model
        self.tokenizer = tokenizer
        self._repair = parse_repair(repair)
        self._lock = threading.RLock()
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._requests = 0
        self._tokens = Tokens(tokenizer)
        self._renderer = Renderer(tokenizer, layout or Layout())
        self._registry = Registry()
        self._composer = Composer(self._registry, self._tokens)
        self._prefixes = PrefixCache(max_prefix_bytes)
        self._runner = check_support(model) if reuse == "on" else None
        self._store: ChunkStore = MemoryStore(max_memory_bytes)
        if self._runner is not None:
            self._prepare_reuse(context_documents, chunker or AdaptiveChunker(), namespace, cache_dir)
        elif cache_dir is not None or context_documents:
            raise ValueError("cache_dir and context_documents have no use with reuse='off'; leave them out")

    def _prepare_reuse(
        self, context_documents: Sequence[str], chunker: Chunker, namespace: str, cache_dir: str | Path | None
    ) -> None:
        assert self._runner is not None
        self.fingerprint = fingerprint(self.model, self.tokenizer, namespace)
        context = CanonicalContext.of(self.fingerprint, self._context_ids(context_documents))
        self._encoder = Encoder(self._runner, self._tokens, chunker, context, self.fingerprint)
        if len(context.token_ids):
            span = Span(0, len(context.token_ids), SpanKind.COMPUTED)
            self._prefixes.put(Prefix(context.token_ids, self._encoder.context_kv, (span,), "", pinned=True))
        if cache_dir is not None:
            self._store = TieredStore(self._store, DiskStore(Path(cache_dir), self.fingerprint))
        self._assembler = Assembler(self._runner)
        self._planner = Planner(self._store, self._chunks_of, prefix_seed(self.fingerprint), context.key)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        download: bool = False,
        **options: Any,
    ) -> KVBoostEngine:
        """Load a model and make its engine.

        Parameters
        ----------
        model
            A folder, a GGUF file, a model id in the local hub cache, or ``"smollm2"``, the embedded small model.
        dtype, device, download
            See :func:`kvboost_rag.loading.load_model`.
        **options
            Of the constructor.
        """
        loaded, tokenizer = load_model(model, dtype=dtype, device=device, download=download)
        return cls(loaded, tokenizer, **options)

    def _context_ids(self, context_documents: Sequence[str]) -> TokenIds:
        head = self._renderer.head
        ids = [] if self._renderer.uses_template else [self._tokens.start(head)]
        ids.append(self._tokens.template(head))
        for text in context_documents:
            ids += [self._tokens.document(text.strip()), self._tokens.template(self._renderer.separator)]
        return np.concatenate(ids)

    # Documents ---------------------------------------------------------------------------------------------------

    def add_documents(self, documents: Iterable[Document], *, show_progress: bool = False) -> list[str]:
        """Turn documents into KV.

        A document whose KV is stored already costs no forward. One with a known id and another text replaces the
        old version. When interrupted, documents that were finished stay; adding all of them again does the rest.

        Parameters
        ----------
        documents
            With distinct ids.
        show_progress
            Whether to draw a progress bar.

        Returns
        -------
        list[str]
            Their ids, in order.

        Raises
        ------
        ValueError
            For an empty document or an id that comes twice; nothing is added then.
        ContextWindowError
            For a document longer than the model's context window; nothing is added then.
        """
        self._check_open()
        listed = _distinct(documents)
        prepared = {d.id: self._registered(d) for d in listed}
        missing = [r.chunks for r in prepared.values() if not all(c.key.prefix in self._store for c in r.chunks)]
        with tqdm(total=len(listed), unit="document", desc="prefill", disable=not show_progress) as bar:
            for registered in prepared.values():
                if registered.chunks not in missing:
                    self._register(registered, [])
                    bar.update()
            entries = self._encoder.encode(missing) if missing else iter(())
            while batch := self._next(entries):
                self._register(prepared[batch[0].chunk.document_id], batch)
                bar.update()
        return [d.id for d in listed]

    def _registered(self, document: Document) -> Registered:
        text = document.text.strip()
        if not text:
            raise ValueError(f"document {document.id!r} is empty; leave it out or give it text")
        return Registered(document, text, self._encoder.chunks(document) if self._runner else ())

    def _next(self, entries: Any) -> list[ChunkKV] | None:
        with self._lock:
            self._check_open()
            return next(entries, None)

    def _register(self, registered: Registered, entries: Sequence[ChunkKV]) -> None:
        with self._lock:
            old = self._registry.get(registered.document.id)
            for entry in entries:
                self._store.put(entry)
            self._registry.put(registered)
            if old is not None and old.text != registered.text:
                self._forget(old)

    def remove_documents(self, document_ids: Iterable[str]) -> None:
        """Forget documents and their KV, in every tier.

        Raises
        ------
        KeyError
            If an id is not known; nothing is removed then.
        """
        self._check_open()
        ids = [document_ids] if isinstance(document_ids, str) else list(document_ids)
        with self._lock:
            missing = self._registry.missing(ids)
            if missing:
                raise KeyError(f"unknown document ids: {', '.join(map(repr, missing))}")
            for document_id in ids:
                old = self._registry.remove(document_id)
                if old is not None:
                    self._forget(old)

    def _forget(self, registered: Registered) -> None:
        for chunk in self._registry.unused(registered.chunks):
            self._store.delete(chunk.key)
        self._prefixes.forget_documents([registered.document.id])

    @property
    def documents(self) -> list[Document]:
        """Every known document, in the order of adding."""
        with self._lock:
            return [registered.document for registered in self._registry]

    def locate(self, text: str) -> list[Located]:
        """Find known documents inside a text, whole or cut at their end."""
        self._check_open()
        with self._lock:
            found = self._registry.locate(text)
        return [Located(registered.document, m.start, m.end, m.complete) for registered, m in found]

    # Answers -----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Answer a prompt; takes what :meth:`stream` takes."""
        stream = self.stream(prompt, **options)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                result: Result = end.value
                return result

    def stream(
        self,
        prompt: Prompt,
        *,
        documents: Sequence[Document | str] | None = None,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        repair: str | Repair | None = None,
        reuse: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Generator[Delta, None, Result]:
        """Answer a prompt piece by piece. Closing the generator stops the compute.

        Parameters
        ----------
        prompt
            Messages (mappings with ``role`` and ``content``) or text. Text with ``documents`` is a question, laid out
            as a user's message; text without is continued as it stands. Known documents are found in either.
        documents
            Documents, or ids of known ones, to put before the question in this order.
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, ignore_eos
            See :class:`kvboost_rag.sampling.Sampling`; None takes the model's generation config.
        repair
            Instead of the engine's.
        reuse
            False computes the whole prompt, as a reference.
        template_options
            Further arguments of the chat template.

        Yields
        ------
        Delta
            New text and tokens; the first one comes with the first token.

        Returns
        -------
        Result
            The whole answer and its report, as the generator's return value.

        Raises
        ------
        ContextWindowError
            If prompt and ``max_tokens`` exceed the context window.
        """
        self._check_open()
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=as_stops(stop), ignore_eos=ignore_eos,
        )
        method = self._repair if repair is None else parse_repair(repair)
        return self._stream(prompt, documents or (), template_options or {}, method, reuse, sampling)

    def _stream(
        self,
        prompt: Prompt,
        documents: Sequence[Document | str],
        options: Mapping[str, Any],
        repair: Repair,
        reuse: bool,
        sampling: Sampling,
    ) -> Generator[Delta, None, Result]:
        request = self._request(prompt, documents, options, repair, reuse, sampling.max_tokens)
        session = self._open(request)
        answer = decode(
            session.logits,
            lambda token: self._step(session, token),
            prompt_ids=_ids(request.pieces),
            tokenizer=self.tokenizer,
            sampling=sampling,
            generation_config=self.model.generation_config,
        )
        ttft = request.clock.elapsed()
        finish: Finish | None = None
        try:
            while True:
                try:
                    delta = next(answer)
                except StopIteration as end:
                    finish = end.value
                    break
                if "first token" not in request.clock.stages:
                    request.clock.lap("first token")
                    ttft = request.clock.elapsed()
                yield delta
        except GeneratorExit:
            self._keep(session, request)
            raise
        finally:
            answer.close()
        self._keep(session, request)
        return Result(finish.text, finish.token_ids, finish.reason, self._report(session, request, ttft))

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        *,
        documents: Sequence[Document | str] | None = None,
        repair: str | Repair | None = None,
        reuse: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Scored:
        """Compute the logits of a given answer (teacher-forced), to compare repair methods.

        Parameters
        ----------
        prompt, documents, repair, reuse, template_options
            As for :meth:`stream`.
        continuation
            Token ids of the answer, at least one.
        """
        self._check_open()
        ids = np.asarray(continuation, dtype=np.int64)
        if not ids.size:
            raise ValueError("the continuation is empty; give at least one token id")
        method = self._repair if repair is None else parse_repair(repair)
        request = self._request(prompt, documents or (), template_options or {}, method, reuse, len(ids))
        session = self._open(request)
        ttft = request.clock.elapsed()
        with self._lock:
            logits = session.score(ids)
        return Scored(logits, self._report(session, request, ttft))

    def _request(
        self,
        prompt: Prompt,
        documents: Sequence[Document | str],
        options: Mapping[str, Any],
        repair: Repair,
        reuse: bool,
        max_tokens: int,
    ) -> _Request:
        clock = _Clock()
        with self._lock:
            given = [self._resolved(d) for d in documents]
            segments = self._renderer.render(prompt, given, options)
            clock.lap("render")
            pieces = self._composer.pieces(segments, raw=self._renderer.is_raw(prompt, given))
            clock.lap("locate")
        self._check_window(sum(len(p.token_ids) for p in pieces), max_tokens)
        return _Request(pieces, max_tokens, repair, reuse and self._runner is not None, clock)

    def _resolved(self, document: Document | str) -> Document:
        if isinstance(document, Document):
            return document
        known = self._registry.get(document)
        if known is None:
            raise ValueError(f"document {document!r} is not known; add it first, or pass a Document")
        return known.document

    def _check_window(self, prompt_tokens: int, max_tokens: int) -> None:
        window = getattr(self.model.config, "max_position_embeddings", None)
        if window is not None and prompt_tokens + max_tokens > window:
            raise ContextWindowError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, but the model's context "
                f"window is {window}; pass fewer or shorter documents, or a smaller max_tokens"
            )

    def _open(self, request: _Request) -> PlainAnswer | ReusingAnswer:
        with self._lock:
            self._check_open()
            session = self._open_reusing(request) if request.reuse else self._open_plain(request)
            request.clock.lap("prefill")
            self._requests += 1
            self._counts.update({span.kind.value: 0 for span in session.spans})
            for span in session.spans:
                self._counts[span.kind.value] += span.tokens
        return session

    def _open_plain(self, request: _Request) -> PlainAnswer:
        spans, start = [], 0
        for piece in request.pieces:
            end = start + len(piece.token_ids)
            spans.append(Span(start, end, SpanKind.COMPUTED, piece.document_id, "reuse is off"))
            start = end
        return PlainAnswer(PlainSession(self.model), _ids(request.pieces), tuple(spans))

    def _open_reusing(self, request: _Request) -> ReusingAnswer:
        assert self._runner is not None
        hit = self._prefixes.match(_ids(request.pieces), request.repair.name)
        plan = self._planner.plan(request.pieces, hit)
        request.clock.lap("plan")
        cache = self._assembler.assemble(plan, hit, len(plan.token_ids) + request.max_tokens)
        request.clock.lap("assemble")
        done = prefill(self._runner, plan, cache, request.repair)
        return ReusingAnswer(self._runner, cache, done.logits, done.spans, plan.token_ids)

    def _step(self, session: PlainAnswer | ReusingAnswer, token_id: int) -> Tensor:
        with self._lock:
            self._check_open()
            return session.step(token_id)

    def _keep(self, session: PlainAnswer | ReusingAnswer, request: _Request) -> None:
        """Leave the prompt's KV to later prompts that begin alike."""
        if isinstance(session, ReusingAnswer):
            prefix = Prefix(session.token_ids, session.cache, session.all_spans, request.repair.name)
            with self._lock:
                if not self._closed and not self._prefixes.put(prefix):
                    logger.info("a prompt of %d bytes exceeds max_prefix_bytes and is not kept", prefix.nbytes)

    def _report(self, session: PlainAnswer | ReusingAnswer, request: _Request, ttft: float) -> Report:
        fallback = "" if request.reuse else "reuse is off"
        repair = request.repair.name if request.reuse else "off"
        return Report(session.spans, repair, ttft, request.clock.elapsed(), dict(request.clock.stages), fallback)

    def _chunks_of(self, document_id: str) -> Sequence[Chunk]:
        registered = self._registry.get(document_id)
        return registered.chunks if registered else ()

    # Life --------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What is stored and what was served."""
        with self._lock:
            tokens = {kind.value: self._counts[kind.value] for kind in SpanKind}
            return Stats(
                documents=len(self._registry),
                document_tokens=sum(r.tokens for r in self._registry),
                chunks=len(self._store),
                store_bytes=self._store.nbytes,
                prefix_bytes=self._prefixes.nbytes,
                requests=self._requests,
                tokens=tokens,
            )

    def close(self) -> None:
        """Release the KV; a closed engine refuses every call. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._prefixes.clear()
                self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def __enter__(self) -> KVBoostEngine:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()


def _distinct(documents: Iterable[Document]) -> list[Document]:
    listed = list(documents)
    for document in listed:
        if not isinstance(document, Document):
            raise TypeError(f"add_documents takes Document objects, not {type(document).__name__}")
    twice = [i for i, n in Counter(d.id for d in listed).items() if n > 1]
    if twice:
        raise ValueError(f"document ids come twice: {', '.join(map(repr, twice))}; give each document its own")
    return listed


def _ids(pieces: Sequence[Piece]) -> TokenIds:
    return np.concatenate([piece.token_ids for piece in pieces])
