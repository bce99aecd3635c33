"""The measured methods behind one contract."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvboost_rag.bench.plain import PlainAnswer, PlainModel
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.report import Report, Scored
from kvboost_rag.types import Document, SpanKind, TokenIds

__all__ = ["ANSWER_TOKENS", "KEPT_PROMPTS", "Answered", "FirstToken", "Method", "Question", "make_method", "token_ids"]

ANSWER_TOKENS = 32
"""Greedy tokens that are compared."""

KEPT_PROMPTS = 8
"""Earlier prompts that ``prefix-cache`` keeps."""


@dataclass(frozen=True)
class Question:
    """A prompt: the question and the documents before it."""

    text: str
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class FirstToken:
    """One timed first token.

    Parameters
    ----------
    seconds
        From the call on, everything included.
    recomputed_share
        Of the tokens that are not exactly there already (stored after another history, or for the baselines not in
        the prefix cache): the share that was computed. None if there are none.
    reused_share
        Share of prompt tokens whose KV was taken as it was stored.
    prompt_tokens
        Of the whole prompt.
    """

    seconds: float
    recomputed_share: float | None
    reused_share: float
    prompt_tokens: int


@dataclass(frozen=True, eq=False)
class Answered:
    """An answer of :data:`ANSWER_TOKENS` tokens.

    Parameters
    ----------
    token_ids
        Greedy, through any end of text; shorter where more than the first line would be no use.
    logits
        ``[tokens, vocabulary]`` float32, teacher-forced over the reference's tokens.
    first
        The first token, timed on the way.
    """

    token_ids: tuple[int, ...]
    logits: Tensor
    first: FirstToken


class Method(ABC):
    """A way to answer a prompt."""

    @abstractmethod
    def first_token(self, question: Question) -> FirstToken:
        """Answer with one token and take the time."""

    @abstractmethod
    def answer(self, question: Question, reference: tuple[int, ...] | None) -> Answered:
        """Answer, and score the reference's tokens; None scores the own ones."""

    def finish(self) -> None:  # noqa: B027
        """Let later samples profit from the latest prompt, where the method does so."""

    def recall(self, question: Question) -> None:  # noqa: B027
        """Take up a sample that was measured before an interruption, where it matters to later ones."""


def make_method(name: str, engine: KVBoostEngine, seed: int) -> Method:
    """Make a method from its name; ``random`` repairs without a seed of their own get this one."""
    if name == "full":
        return _Plain(engine, PlainModel(engine.model))
    if name == "joint":
        return _Joint(engine, PlainModel(engine.model))
    if name == "prefix-cache":
        return _PrefixCache(engine, PlainModel(engine.model, KEPT_PROMPTS))
    lone_random = name.split(":")[0] == "random" and "+" not in name and "seed=" not in name
    return _Repaired(engine, f"{name}:seed={seed}" if lone_random else name)


def token_ids(engine: KVBoostEngine, question: Question, answer_tokens: int) -> TokenIds:
    """Compose the engine's own token ids of a prompt, ``[tokens]`` int64.

    Raises
    ------
    ContextWindowError
        If prompt and answer exceed the context window.
    """
    return engine.tokenize(question.text, documents=question.documents, max_tokens=answer_tokens)


class _Plain(Method):
    """Full prefill; the time of composing the prompt is in its TTFT as it is in the engine's."""

    def __init__(self, engine: KVBoostEngine, model: PlainModel) -> None:
        self._engine = engine
        self._model = model

    def first_token(self, question: Question) -> FirstToken:
        return self._prefill(question)[1]

    def answer(self, question: Question, reference: tuple[int, ...] | None) -> Answered:
        prompt, first = self._prefill(question)
        if reference is None:
            return Answered(*prompt.greedy(ANSWER_TOKENS), first)
        logits = prompt.score(reference)
        if tuple(logits.argmax(dim=-1).tolist()) == reference:
            return Answered(reference, logits, first)
        return Answered(self._prefill(question)[0].greedy(ANSWER_TOKENS)[0], logits, first)

    def _prefill(self, question: Question) -> tuple[PlainAnswer, FirstToken]:
        start = time.perf_counter()
        ids = self._ids(question)
        answer = self._model.prefill(ids)
        int(answer.logits.argmax())
        seconds = time.perf_counter() - start
        return answer, FirstToken(seconds, 1.0, answer.reused / len(ids), len(ids))


    def _ids(self, question: Question) -> TokenIds:
        return token_ids(self._engine, question, ANSWER_TOKENS)


class _Joint(_Plain):
    """Full prefill of the same text tokenised as one, documents and all, as without reuse of documents."""

    def _ids(self, question: Question) -> TokenIds:
        tokenizer = self._engine.tokenizer
        text = tokenizer.decode(super()._ids(question), clean_up_tokenization_spaces=False)
        return np.asarray(tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int64)


class _PrefixCache(_Plain):
    """Prefix caching: earlier samples' prompts are kept, the sample's own is not until it is finished."""

    def finish(self) -> None:
        self._model.keep()

    def recall(self, question: Question) -> None:
        self._prefill(question)
        self._model.keep()


class _Repaired(Method):
    """Reuse of stored documents with a repair."""

    def __init__(self, engine: KVBoostEngine, repair: str) -> None:
        self._engine = engine
        self._repair = repair

    def first_token(self, question: Question) -> FirstToken:
        return _first(self._score(question, (0,), greedy=False).report)

    def answer(self, question: Question, reference: tuple[int, ...] | None) -> Answered:
        if reference is None:
            # Any tokens will do to find the own ones, which are then scored.
            reference = self._score(question, (0,) * ANSWER_TOKENS, greedy=True).greedy
            assert reference is not None
        scored = self._score(question, reference, greedy=True)
        assert scored.greedy is not None
        return Answered(scored.greedy, scored.logits, _first(scored.report))

    def _score(self, question: Question, tokens: tuple[int, ...], *, greedy: bool) -> Scored:
        return self._engine.score(
            question.text, tokens, documents=question.documents, repair=self._repair, greedy=greedy,
            enough=self._has_a_line if greedy else None,
        )  # fmt: skip

    def _has_a_line(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer is complete, of which nothing but the first line is read."""
        return "\n" in str(self._engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)).lstrip()


def _first(report: Report) -> FirstToken:
    inexact = report.tokens(SpanKind.APPROXIMATE) + report.tokens(SpanKind.RECOMPUTED)
    share = report.recomputed_share if inexact else None
    return FirstToken(report.ttft, share, report.reused_share, report.prompt_tokens)
