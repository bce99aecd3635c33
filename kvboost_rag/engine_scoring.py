"""Given answers and stored KV, compared with full prefill's: the half of the façade that answers nobody."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from kvboost_rag.answering import Asked, Clock, Request, Session
from kvboost_rag.deviation import Deviation, relative_distance
from kvboost_rag.model import ModelRunner
from kvboost_rag.prompt import Prompt
from kvboost_rag.repair import Repair
from kvboost_rag.report import Scored
from kvboost_rag.session import ReusingAnswer, greedy_answer
from kvboost_rag.types import Document

__all__ = ["ScoringMethods", "as_list"]


class ScoringMethods(ABC):
    """What :class:`kvboost_rag.KVBoostEngine` offers to compare methods."""

    _lock: threading.RLock
    _repair: Repair
    _runner: ModelRunner

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineClosedError after close()."""

    @abstractmethod
    def _method(self, repair: str | Repair | None, quality: str | float | None) -> Repair | None:
        """Return what a call asks for; None if it asks for nothing."""

    @abstractmethod
    def _turn(self) -> AbstractContextManager[None]:
        """Have the model between two batches."""

    @abstractmethod
    def _open(self, asked: Asked, timeout: float | None = None) -> tuple[Request, Session]:
        """Compose and prefill."""

    @abstractmethod
    def _opened(self, asked: Asked, clock: Clock) -> tuple[Request, Session]:
        """Do the same in a turn and under the lock that the caller has."""

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        *,
        documents: Sequence[Document | str] | None = None,
        repair: str | Repair | None = None,
        quality: str | float | None = None,
        reuse: bool = True,
        template_options: Mapping[str, Any] | None = None,
        greedy: bool = False,
        enough: Callable[[Sequence[int]], bool] | None = None,
    ) -> Scored:
        """Compute the logits of a given answer (teacher-forced), to compare repair methods.

        Parameters
        ----------
        prompt, documents, repair, quality, reuse, template_options
            As for :meth:`stream`.
        continuation
            Token ids of the answer, at least one.
        greedy
            Also answer freely, over the same prefill: the likeliest token every time, through any end of text.
        enough
            Tells of the free answer so far, once it differs from the given one, whether it may end early.

        Raises
        ------
        ValueError
            For a continuation that is no list of token ids, or ``enough`` without ``greedy``.
        """
        self._check_open()
        if enough is not None and not greedy:
            raise ValueError("enough ends the free answer, and there is none; pass greedy=True, or leave it out")
        ids = np.asarray(continuation)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError("the continuation is no list of token ids; give at least one integer")
        ids = ids.astype(np.int64)
        method = self._method(repair, quality) or self._repair
        asked = Asked(prompt, as_list(documents), template_options or {}, method, reuse, len(ids))
        request, session = self._open(asked)
        # An accelerator may still be at work; the first token is there once its id is.
        int(session.logits.argmax())
        ttft = request.clock.elapsed()
        with self._lock:
            logits = session.score(ids)
            own = greedy_answer(session, ids, logits, enough or _never) if greedy else None
        return Scored(logits, request.report(session, ttft), own)

    def deviation(
        self,
        prompt: Prompt,
        *,
        documents: Sequence[Document | str] | None = None,
        repair: str | Repair | None = None,
        quality: str | float | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Deviation:
        """Compare the KV that a prompt would be answered from with full prefill's, to see what a repair repairs.

        Takes a full prefill and the memory of two prompts; nothing is kept.

        Parameters
        ----------
        prompt, documents, repair, quality, template_options
            As for :meth:`stream`.

        Raises
        ------
        ValueError
            If the engine reuses nothing, or not for a prompt as long as this.
        """
        method = self._method(repair, quality) or self._repair
        asked = Asked(prompt, as_list(documents), template_options or {}, method, True, 0)
        with self._turn(), self._lock:
            request, session = self._opened(asked, Clock())
            if not isinstance(session, ReusingAnswer):
                raise ValueError(f"nothing is reused for this prompt: {session.fallback}; there is nothing to compare")
            length = len(request.token_ids)
            ids = torch.from_numpy(request.token_ids).to(self._runner.device)
            slots, full = torch.arange(length, device=ids.device), self._runner.new_cache(length)
            self._runner.encode(ids[None], slots, slots, full, length)
            own = session.cache.keys[:, 0, :, :length], session.cache.values[:, 0, :, :length]
            keys, values = (relative_distance(a, b[:, 0]) for a, b in zip(own, (full.keys, full.values), strict=True))
        return Deviation(keys, values, session.spans)


def _never(token_ids: Sequence[int]) -> bool:
    return False


def as_list(documents: Sequence[Document | str] | None) -> Sequence[Document | str]:
    """Check that a call's documents are a list.

    Raises
    ------
    TypeError
        For a single document or id.
    """
    if isinstance(documents, (str, Document)):
        raise TypeError("documents is a list of documents or ids; put a single one into a list")
    return list(documents or ())
