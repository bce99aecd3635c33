"""The façade: the only file that knows the order of the stages."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.answering import Asked, Clock, PlainPath, Request, ReusePath, Session, compose_request
from kvboost_rag.batching import Turns
from kvboost_rag.chunking import AdaptiveChunker, Chunker
from kvboost_rag.compose import Composer
from kvboost_rag.contexts import context_texts
from kvboost_rag.decode import Delta, Finish, build_processors, decode
from kvboost_rag.engine_documents import DocumentMethods
from kvboost_rag.engine_scoring import ScoringMethods, as_list
from kvboost_rag.errors import EngineClosedError, ModelChangedError
from kvboost_rag.generic_texts import CONTEXT_TEXTS
from kvboost_rag.library import Library
from kvboost_rag.loading import load_model
from kvboost_rag.model import SpareMemory, WeightsWatch, unwrapped
from kvboost_rag.owner import Owner, tenant_of
from kvboost_rag.plan import missed
from kvboost_rag.policy import Policy
from kvboost_rag.prefix import PrefixCache
from kvboost_rag.prompt import Layout, Prompt, Renderer
from kvboost_rag.quantize import KVFormat
from kvboost_rag.refill import Refill
from kvboost_rag.registry import Registry
from kvboost_rag.repair import Repair, check_policy, parse_repair
from kvboost_rag.report import Result, Stats
from kvboost_rag.sampling import Sampling, as_stops
from kvboost_rag.session import ReusingAnswer, step_together
from kvboost_rag.sizes import parse_bytes
from kvboost_rag.space_maker import SpaceMaker
from kvboost_rag.spaces import Space, Spaces
from kvboost_rag.store import ChunkStore, EvictionScore, RedisTier, StoreOptions, redis_tier
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Document, SpanKind, TokenIds
from kvboost_rag.usage import UsageLedger

__all__ = ["KVBoostEngine"]

logger = logging.getLogger("kvboost_rag")

_MAX_PREFIX_BYTES = 1 << 30

_FOR_REUSE: dict[str, object] = {
    "repair": None, "quality": None, "policy": None, "context_documents": (), "chunker": None, "kv_dtype": "native",
    "sink_tokens": None, "cache_dir": None, "store": None, "max_memory_bytes": None, "max_disk_bytes": None,
    "max_prefix_bytes": _MAX_PREFIX_BYTES, "eviction": "importance", "read_only": False, "refill": True,
    "secret": None, "max_batch": 1,
}  # fmt: skip
"""Options of the constructor that have no use without reuse, and their defaults."""

Step = tuple[Session, int, Clock]
"""A stream's answer, its next token, and its time."""


class KVBoostEngine(DocumentMethods, ScoringMethods):
    """Answers prompts over documents whose KV was computed once.

    Safe to use from several threads: forwards are run one at a time, streams may be interleaved. With ``max_batch`` the
    streams of several threads share their decode forwards.

    Parameters
    ----------
    model, tokenizer
        A loaded causal language model of transformers and its tokenizer.
    reuse
        ``"on"`` refuses a model whose KV can not be moved; ``"off"`` runs any model as transformers does.
    repair
        Which reused tokens are computed again: a specification as ``"cacheblend:0.15"``, or a
        :class:`kvboost_rag.repair.Repair`; None is ``"auto"``, which takes what the policy names for the quality.
    quality
        For ``auto``: ``"floor"``, ``"standard"`` (the default), ``"safe"``, or a KL to full prefill in nats a token.
    policy
        What ``auto`` chooses from; None takes the one that ``kvboost-rag calibrate`` left in ``cache_dir``, or else the
        one that comes along for the model's family.
    layout
        Places of documents that are handed over apart, and with them the canonical head.
    context_documents
        Generic texts that every document is encoded after, each right behind the head and side by side with the others,
        so that a document's KV is about their mean; ``"generic"`` takes those that come along. Closer to full prefill
        with the models that were measured (``docs/repair-frontier.md``), but then of no document more than the first
        tokens right behind the head is exact, so none is the default.
    chunker
        Chooses the chunks' boundaries.
    namespace
        Tenant; part of every key.
    kv_dtype
        What documents' keys and values are stored as: ``"native"``, ``"int8"``, ``"int4"`` or ``"int8/int4"``, which
        take about .52, .30 and .40 of bfloat16. No document is exact when it is quantised.
    sink_tokens
        How many first tokens of each document stay native then; None for the default.
    cache_dir
        Folder in which KV outlives the process; None keeps it in memory alone. Several processes may share it.
    store
        A Redis server by which machines share KV, behind memory and ``cache_dir``: ``"redis://host:6379/0"``, or a
        :class:`RedisTier` for more options. Needs ``pip install 'kvboost-rag[redis]'``.
    max_memory_bytes, max_disk_bytes
        Budgets of the documents' KV in memory and of the folder: bytes, or text as ``"4GiB"``; None for no limit.
    max_prefix_bytes
        Budget of the KV of earlier prompts, for conversations.
    eviction
        What stays when a budget is reached: ``"importance"`` (what is retrieved and used most), ``"lru"``, ``"lfu"``.
    read_only
        Whether ``cache_dir`` and ``store`` are read and nothing in them is changed.
    refill
        Whether documents whose KV was evicted are encoded again, in the background, after an answer that missed them.
        Not with ``read_only``, and more and more rarely for a document whose KV goes again before it is used.
    trusted_only
        Whether documents are refused that a request brings and nobody added; with ``cache_dir`` or ``store`` it
        needs ``secret``.
    secret
        Signs what is written to ``cache_dir`` and ``store``; nothing is served from there that was not signed with
        it. At least 16 bytes; engines with different secrets share no KV.
    max_batch
        Answers, read in threads of their own, whose decode steps share one forward; 1 runs every step by itself. New
        prompts are computed one at a time, in turn with the steps. Answers to ``reuse=False`` step by themselves, and
        so do all if the model's attention allows nothing else, which is measured and logged. Logits differ from those
        of an answer alone by rounding (about 1e-5 in float32).

    Raises
    ------
    UnsupportedModelError
        If ``reuse="on"`` and the check at load fails.
    ValueError
        If an option is wrong, or the server of ``store`` answers and does not let us in. One that does not answer is
        waited for: the engine works without it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reuse: Literal["on", "off"] = "on",
        repair: str | Repair | None = None,
        quality: str | float | None = None,
        policy: Policy | None = None,
        layout: Layout | None = None,
        context_documents: Sequence[str] | Literal["generic"] = (),
        chunker: Chunker | None = None,
        namespace: str = "",
        kv_dtype: str = "native",
        sink_tokens: int | None = None,
        cache_dir: str | Path | None = None,
        store: str | RedisTier | None = None,
        max_memory_bytes: int | str | None = None,
        max_disk_bytes: int | str | None = None,
        max_prefix_bytes: int | str = _MAX_PREFIX_BYTES,
        eviction: str | EvictionScore = "importance",
        read_only: bool = False,
        refill: bool = True,
        trusted_only: bool = False,
        secret: str | bytes | None = None,
        max_batch: int = 1,
    ) -> None:
        self.kv_format = KVFormat(kv_dtype, sink_tokens)
        _check_reuse(reuse, locals())
        _check_batch(max_batch)
        # A PeftModel's layers, with their adapters, are those of the model inside.
        self.model = model = unwrapped(model)
        self.tokenizer = tokenizer
        self._lock = threading.RLock()
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._abandoned: deque[tuple[Session, Request]] = deque()
        self._turns: Turns[Step, Tensor] | None = Turns(self._run_steps, max_batch) if max_batch > 1 else None
        self._tokens = Tokens(tokenizer)
        self._renderer = Renderer(tokenizer, layout or Layout(), self._tokens.cuts)
        self._registry = Registry()
        self._composer = Composer(self._registry, self._tokens, trusted_only=trusted_only)
        self._prefixes = PrefixCache(parse_bytes(max_prefix_bytes, "max_prefix_bytes"))
        self._plain = PlainPath(model)
        self._reuse: ReusePath | None = None
        self._signed = secret is not None
        self.trusted_only = trusted_only
        self._usage = UsageLedger()
        stores = StoreOptions(
            max_memory_bytes, eviction, cache_dir, max_disk_bytes, read_only, Owner.of(secret), redis_tier(store),
            trusted_only,
        )  # fmt: skip
        stores.check_shared()
        self._memory = stores.memory(self._usage)
        self._store: ChunkStore = self._memory
        self._space = Space("", self._memory)
        self._watch = WeightsWatch(model)
        contexts = context_texts(context_documents)
        if reuse == "on":
            maker = SpaceMaker(
                model, tokenizer, tenant_of(namespace, stores.owner), self.kv_format, self._renderer, self._tokens,
                chunker or AdaptiveChunker(), contexts, stores, self._memory, self._usage,
                self._prefixes, SpareMemory(),
            )  # fmt: skip
            self._spaces = Spaces(self._watch.state, maker.fingerprint, maker.make)
        else:
            self._spaces = Spaces(lambda: None, lambda: "", lambda fingerprint: self._space)
        self._library = Library(self._registry, self._prefixes, self._spaces, self._lock, self._current)
        self._current()
        self.policy = self._policy(policy, stores.folder) or _shipped_policy(model, contexts)
        self._repair = self._method(repair, quality) or parse_repair("auto", self.policy)
        logger.info("engine ready: reuse %s, repair %s, policy %s", reuse, self.repair, self.policy.source)
        self._refill = Refill(self._library, self._served) if refill and not read_only else None

    def _current(self) -> Space:
        """Enter the key space of the model as it is now, if it is not that of the last look; return it."""
        self._check_open()
        space = self._spaces.current()
        if space is not self._space:
            self._enter(space)
        return space

    def _enter(self, space: Space) -> None:
        # What was counted goes to the folder of the space that it was counted in.
        self._space.store.flush()
        self._space, self._store, self.fingerprint = space, space.store, space.fingerprint
        is_new = self._prefixes.enter(space.fingerprint)
        if space.reuse is not None:
            self._runner, self._encoder, self._planner = space.reuse.runner, space.reuse.encoder, space.reuse.planner
            self._reuse, self.context_key = space.reuse.path, space.reuse.encoder.context.key
            if is_new and space.reuse.head is not None:
                self._prefixes.put(space.reuse.head)
        self._library.enter(space)
        for gone in self._spaces.take_gone():
            self._prefixes.drop(gone.fingerprint)
            self._library.leave_for_good(gone, self._memory)

    def _policy(self, given: Policy | None, folder: Path | None) -> Policy | None:
        """Return the policy that was given, or else the one that a calibration left in the cache folder."""
        self.policy_path = None if folder is None else folder / f"policy-{self.context_key}.json"
        if given is not None:
            check_policy(given, given.source)
            return given
        if self.policy_path is None or not self.policy_path.is_file():
            return None
        if self._signed:
            logger.warning("%s is not signed and not used; pass policy=Policy.load(...) to use it", self.policy_path)
            return None
        policy = Policy.load(self.policy_path)
        check_policy(policy, str(self.policy_path))
        return policy

    def _method(self, repair: str | Repair | None, quality: str | float | None) -> Repair | None:
        if quality is None:
            return None if repair is None else parse_repair(repair, self.policy)
        if repair not in (None, "auto"):
            raise ValueError("quality is for repair='auto', which chooses the method; pass one of the two")
        return parse_repair(f"auto:{quality}", self.policy)

    def _served(self, document_id: str) -> int:
        return self.usage(document_id).served if self.get_document(document_id) is not None else 0

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

    def tokenize(
        self,
        prompt: Prompt,
        *,
        documents: Sequence[Document | str] | None = None,
        max_tokens: int = 0,
        template_options: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the token ids of a prompt as the model gets them, with or without reuse: ``[tokens]`` int64.

        Raises
        ------
        ContextWindowError
            If they do not fit the context window together with an answer of ``max_tokens``.
        """
        self._check_open()
        asked = Asked(prompt, as_list(documents), template_options or {}, self._repair, False, max_tokens)
        with self._lock:
            return self._compose(asked, Clock()).token_ids

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
        quality: str | float | None = None,
        reuse: bool = True,
        template_options: Mapping[str, Any] | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        timeout: float | None = None,
    ) -> Generator[Delta, None, Result]:
        """Answer a prompt piece by piece. Closing the generator stops the compute.

        Parameters
        ----------
        prompt
            Messages (mappings with ``role`` and ``content``) or text. Text with ``documents`` is a question, laid out
            as a user's message; text without is continued as it stands. Known documents are found in either; a
            message's content may also be a list of texts and documents, which puts these exactly there.
        documents
            Documents, or ids of known ones, to put before the question in this order.
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, ignore_eos
            See :class:`kvboost_rag.sampling.Sampling`; None takes the model's generation config.
        repair, quality
            Instead of the engine's.
        reuse
            False computes the whole prompt, as a reference.
        template_options
            Further arguments of the chat template. With ``continue_final_message`` the answer goes on where the last
            message, the assistant's, ends.
        logits_processor
            Processors of transformers that change the scores of this answer, for example to keep it to a grammar.
            They may hold state, so pass new ones for every answer.
        timeout
            Seconds that the call may take. Looked at between two forwards, none of which is interrupted.

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
        TimeoutError
            If the call takes longer than ``timeout``.
        """
        self._check_open()
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout={timeout} leaves no time; pass seconds above 0, or None for no limit")
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=as_stops(stop), ignore_eos=ignore_eos,
        )
        method = self._method(repair, quality) or self._repair
        # What the generation config makes of it is only known to the processors; better now than after the prefill.
        build_processors(
            sampling, self.model.generation_config, prompt_ids=np.zeros(1, dtype=np.int64), eos=(),
            vocab_size=self.model.config.vocab_size,
        )  # fmt: skip
        asked = Asked(prompt, as_list(documents), template_options or {}, method, reuse, max_tokens)
        return self._stream(asked, sampling, logits_processor, timeout)

    def _stream(
        self,
        asked: Asked,
        sampling: Sampling,
        logits_processor: Sequence[LogitsProcessor],
        timeout: float | None,
    ) -> Generator[Delta, None, Result]:
        request, session = self._open(asked, timeout)
        answer = decode(
            session.logits,
            lambda token: self._step(session, token, request.clock),
            prompt_ids=request.token_ids,
            tokenizer=self.tokenizer,
            sampling=sampling,
            generation_config=self.model.generation_config,
            logits_processor=logits_processor,
        )
        finish = yield from self._forwarded(answer, session, request)
        report = request.report(session, sum(request.clock.stages.values()))
        logger.info("%s", " | ".join(str(report).splitlines()[:2]))
        return Result(finish.text, finish.token_ids, finish.reason, report)

    def _forwarded(
        self, answer: Generator[Delta, None, Finish], session: Session, request: Request
    ) -> Generator[Delta, None, Finish]:
        """Pass an answer on; note when its first token comes, and keep its KV once it is over or nobody listens."""
        try:
            first = next(answer, None)
            request.clock.lap("first token")
            if first is None:
                return Finish("length", None, (), "")
            yield first
            finish = yield from answer
        except GeneratorExit:
            # The garbage collector may close a stream in any thread and inside any lock: kept at the next request.
            if not self._closed:
                self._abandoned.append((session, request))
            raise
        finally:
            answer.close()
            if self._turns is not None:
                self._turns.leave(id(session))
        self._keep(session, request)
        return finish

    def _compose(self, asked: Asked, clock: Clock) -> Request:
        window = getattr(self.model.config, "max_position_embeddings", None)
        return compose_request(asked, clock, self._registry, self._renderer, self._composer, window)

    def _open(self, asked: Asked, timeout: float | None = None) -> tuple[Request, Session]:
        """Compose and prefill under one lock, so that no document changes in between."""
        clock = Clock(timeout)
        with self._turn(), self._lock:
            return self._opened(asked, clock)

    def _turn(self) -> AbstractContextManager[None]:
        """Have the model between two batches; taken before the lock, which whoever runs a batch takes too."""
        return nullcontext() if self._turns is None else self._turns.opening()

    def _opened(self, asked: Asked, clock: Clock) -> tuple[Request, Session]:
        self._current()
        while self._abandoned:
            self._keep(*self._abandoned.popleft())
        clock.lap("wait")
        clock.check()
        request = self._compose(asked, clock)
        session = self._session(request)
        self._check_still(session)
        self._counts["requests"] += 1
        for span in session.spans:
            self._counts[span.kind.value] += span.tokens
        return request, session

    def _session(self, request: Request) -> Session:
        if self._reuse is None or not request.asked.reuse:
            return self._plain.open(request, "reuse is off")
        limit = self._runner.architecture.rotation.limit
        if limit is not None and len(request.token_ids) + request.asked.max_tokens > limit:
            return self._plain.open(request, f"this model rotates prompts of more than {limit} tokens by other angles")
        return self._reuse.open(request)

    def _step(self, session: Session, token_id: int, clock: Clock) -> Tensor:
        if self._turns is not None:
            return self._turns.step(id(session), (session, token_id, clock))
        with self._lock:
            self._check_step(session, clock)
            return session.step(token_id)

    def _run_steps(self, steps: Sequence[Step]) -> list[Tensor | Exception]:
        """Run steps of several streams; what is wrong with one is returned in its place and nowhere else."""
        with self._lock:
            outcomes: dict[int, Tensor | Exception] = {}
            for i, (session, _, clock) in enumerate(steps):
                try:
                    self._check_step(session, clock)
                except Exception as error:
                    outcomes[i] = error
            ready = [i for i in range(len(steps)) if i not in outcomes]
            outcomes.update(zip(ready, step_together([steps[i][:2] for i in ready]), strict=True))
        return [outcomes[i] for i in range(len(steps))]

    def _check_step(self, session: Session, clock: Clock) -> None:
        self._check_open()
        clock.check()
        self._check_still(session)

    def _check_still(self, session: Session) -> None:
        """Raise ModelChangedError if adapters were switched during an answer."""
        # Far cheaper than a look at all weights, which comes when the answer is kept.
        if self._watch.is_switched():
            self._current()
        if self._is_stale(session):
            raise ModelChangedError(
                "the model's adapters or weights changed while it was answering; ask again, and change them between "
                "answers"
            )

    def _is_stale(self, session: Session) -> bool:
        """Whether a session's KV was computed by the model in another state."""
        return isinstance(session, ReusingAnswer) and session.runner is not self._runner

    def _keep(self, session: Session, request: Request) -> None:
        with self._lock:
            if self._closed or not isinstance(session, ReusingAnswer):
                return
            self._current()
            if self._reuse and not self._is_stale(session) and request.is_current(self._registry):
                self._reuse.keep(session, request)
                if self._refill is not None:
                    self._refill.ask(dict.fromkeys(missed(session.spans)))

    # Life --------------------------------------------------------------------------------------------------------

    @property
    def repair(self) -> str:
        """The method that calls take which name none, as reports show it."""
        return self._repair.description

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
                disk_bytes=self._store.disk_bytes,
                shared_hits=self._store.shared_hits,
                requests=self._counts["requests"],
                tokens=tokens,
                evictions=self._memory.evictions,
            )

    def close(self) -> None:
        """Write what is still to be written and release the KV; a closed engine answers and indexes no more.

        Documents that are being added in another thread are not all added; that call raises EngineClosedError.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Not under the lock, which a document that is being encoded needs.
        if self._refill is not None:
            self._refill.close()
        with self._lock:
            self._abandoned.clear()
            self._prefixes.clear()
            # All of them before the memory that they share.
            for space in self._spaces:
                space.store.detach()
            self._memory.close()
            if self._reuse is not None:
                self._runner.spare.close()

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


def _shipped_policy(model: PreTrainedModel, contexts: Sequence[str]) -> Policy:
    return Policy.shipped(model.config.model_type, generic=contexts == CONTEXT_TEXTS)


def _check_batch(max_batch: int) -> None:
    if not isinstance(max_batch, int) or max_batch < 1:
        raise ValueError(f"max_batch={max_batch!r} is no number of answers; pass 1 or more")


def _check_reuse(reuse: str, options: Mapping[str, object]) -> None:
    if reuse not in ("on", "off"):
        raise ValueError(f"reuse is 'on' or 'off', not {reuse!r}")
    # An empty list of context documents is none, as the empty tuple is.
    useless = [name for name, default in _FOR_REUSE.items() if options[name] not in (default, [])]
    if reuse == "off" and useless:
        raise ValueError(f"{', '.join(useless)}: no use with reuse='off'; leave that out")
