"""One prompt whose KV is complete, and its answer growing behind it, by itself or together with others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.model import KVCache, ModelRunner, PlainSession, Row, forward_rows
from kvboost_rag.types import Span, SpanKind, TokenIds

__all__ = ["PlainAnswer", "ReusingAnswer", "greedy_answer", "step_together"]

logger = logging.getLogger("kvboost_rag")


class ReusingAnswer:
    """An answer over an assembled cache, which is long enough from the start.

    Parameters
    ----------
    runner, cache
        The model, as it was when the prompt was computed, and the prompt's KV.
    logits
        ``[vocabulary]`` float32 of the prompt's last token.
    spans
        Of the prompt.
    token_ids
        The prompt.
    fallback
        Why approximate tokens were all computed; empty otherwise.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        logits: Tensor,
        spans: tuple[Span, ...],
        token_ids: TokenIds,
        fallback: str = "",
    ) -> None:
        self.fallback = fallback
        self.logits = logits
        self.spans = spans
        self.cache = cache
        self.runner = runner
        self._ids = token_ids.tolist()

    def step(self, token_id: int) -> Tensor:
        """Run one token; return the next one's logits, ``[vocabulary]`` float32."""
        (logits,) = forward_rows(self.runner, [self.row(token_id)])
        self.append(token_id)
        return logits

    def row(self, token_id: int) -> Row:
        """Return the next step, to be run together with those of others."""
        return Row(token_id, len(self._ids), self.cache)

    def append(self, token_id: int) -> None:
        """Note that a token's KV exists now."""
        self._ids.append(token_id)

    def score(self, token_ids: TokenIds) -> Tensor:
        """Run given tokens; return the logits before each of them, ``[tokens, vocabulary]`` float32."""
        # The last one's successor is not asked for, so it needs no forward.
        start, inputs = len(self._ids), token_ids[:-1]
        if not len(inputs):
            return self.logits[None]
        self._ids += inputs.tolist()
        ids = torch.from_numpy(inputs).to(self.runner.device)
        positions = torch.arange(start, start + len(inputs), device=ids.device)
        return torch.cat([self.logits[None], self.runner.score(ids, positions, self.cache, len(self._ids))])

    def rewind(self) -> None:
        """Forget the answer; its slots are written anew."""
        del self._ids[self.spans[-1].end :]

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and answer, as far as their KV exists."""
        return np.asarray(self._ids, dtype=np.int64)

    @property
    def all_spans(self) -> tuple[Span, ...]:
        """Spans of prompt and answer."""
        end = self.spans[-1].end
        answer = [Span(end, len(self._ids), SpanKind.COMPUTED)] if len(self._ids) > end else []
        return (*self.spans, *answer)


class PlainAnswer:
    """An answer without any reuse, over the model's own cache.

    Parameters
    ----------
    session
        A fresh session.
    token_ids
        The prompt.
    spans
        Of the prompt, all of them computed.
    fallback
        Why nothing is reused.
    """

    def __init__(
        self, session: PlainSession, token_ids: Tensor, spans: tuple[Span, ...], fallback: str
    ) -> None:
        self.fallback = fallback
        self._session = session
        self._prompt = token_ids
        self.spans = spans
        self.logits = session.forward(token_ids)

    def step(self, token_id: int) -> Tensor:
        """Run one token."""
        return self._session.forward(torch.tensor([token_id]))

    def score(self, token_ids: TokenIds) -> Tensor:
        """Run given tokens, one at a time."""
        return torch.stack([self.logits, *(self.step(int(i)) for i in token_ids[:-1])])

    def rewind(self) -> None:
        """Forget the answer; a state that can not be cropped is computed anew."""
        self._session = self._session.fresh()
        self._session.forward(self._prompt)


def step_together(steps: Sequence[tuple[ReusingAnswer | PlainAnswer, int]]) -> list[Tensor | Exception]:
    """Run a token of each of several answers: in one forward those over assembled caches, the others one by one.

    Parameters
    ----------
    steps
        Answers, each once and all of one model, with their tokens.

    Returns
    -------
    list[Tensor | Exception]
        For each the next token's logits, ``[vocabulary]`` float32, or the exception that it alone raised.
    """
    found: dict[int, Tensor | Exception] = {}
    together = [(i, session, token) for i, (session, token) in enumerate(steps) if isinstance(session, ReusingAnswer)]
    if len(together) > 1:
        rows = [session.row(token) for _, session, token in together]
        try:
            logits = forward_rows(together[0][1].runner, rows)
        except Exception:
            # One by one, they show whose fault it is.
            logger.warning("a forward of %d answers failed; their steps run one by one", len(rows), exc_info=True)
        else:
            for (i, session, token), own in zip(together, logits, strict=True):
                session.append(token)
                found[i] = own
    return [found[i] if i in found else _step_alone(session, token) for i, (session, token) in enumerate(steps)]


def _step_alone(session: ReusingAnswer | PlainAnswer, token_id: int) -> Tensor | Exception:
    try:
        return session.step(token_id)
    except Exception as error:
        return error


def greedy_answer(
    session: ReusingAnswer | PlainAnswer,
    token_ids: TokenIds,
    logits: Tensor,
    enough: Callable[[Sequence[int]], bool],
) -> tuple[int, ...]:
    """Answer greedily, with as many tokens as a given answer that has just been scored, or until it is enough.

    Parameters
    ----------
    session
        Has run the given answer, and is left with the own one.
    token_ids
        ``[tokens]`` int64, the given answer.
    logits
        ``[tokens, vocabulary]``, as :meth:`ReusingAnswer.score` returned them.
    enough
        Tells of the answer so far whether it may end; not asked while it is the given one.
    """
    best = logits.argmax(dim=-1).tolist()
    given = token_ids.tolist()
    if best == given:
        return tuple(given)
    # Up to the first difference, the own answer is the given one.
    same = next(i for i, (a, b) in enumerate(zip(best, given, strict=True)) if a != b)
    own = best[: same + 1]
    if enough(own):
        return tuple(own)
    session.rewind()
    row = session.score(np.array([*own, 0], dtype=np.int64))[-1]
    while len(own) < len(given):
        own.append(int(row.argmax()))
        if enough(own):
            break
        if len(own) < len(given):
            row = session.step(own[-1])
    return tuple(own)
