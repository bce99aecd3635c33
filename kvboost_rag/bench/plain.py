"""The baselines: the model as transformers runs it, with or without prefix caching."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvboost_rag.prefix import common_prefix
from kvboost_rag.types import TokenIds

__all__ = ["PlainAnswer", "PlainModel"]


@dataclass(frozen=True, eq=False)
class _Kept:
    token_ids: TokenIds
    cache: DynamicCache


class PlainModel:
    """A model of transformers over its own growing cache, which knows nothing of stored documents.

    With ``kept_prompts`` it does prefix caching: the cache of the earlier prompt that shares the most leading tokens
    is cropped to those, and only the others are computed.

    Parameters
    ----------
    model
        A causal language model.
    kept_prompts
        How many of the latest prompts are kept; 0 for a full prefill every time.
    """

    def __init__(self, model: PreTrainedModel, kept_prompts: int = 0) -> None:
        self._model = model
        self._limit = kept_prompts
        self._kept: list[_Kept] = []
        self._latest: _Kept | None = None
        names = inspect.signature(model.forward).parameters
        # transformers 5.2x renamed the argument.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        # The whole prompt's logits are never wanted, and would cost a tenth to a third of a prefill.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def prefill(self, token_ids: TokenIds) -> PlainAnswer:
        """Compute a prompt, ``[tokens]`` int64, as far as no kept one has it."""
        cache, reused = self._longest(token_ids)
        self._latest = _Kept(token_ids, cache)
        answer = PlainAnswer(self, cache, reused)
        answer.logits = self.forward(token_ids[reused:], cache, last_only=True)[0]
        return answer

    def keep(self) -> None:
        """Keep the latest prompt for later ones; until this is called, equal prompts do not profit from each other."""
        if self._limit and self._latest is not None:
            self._kept = [*self._kept, self._latest][-self._limit :]
        self._latest = None

    def _longest(self, token_ids: TokenIds) -> tuple[DynamicCache, int]:
        shared = [common_prefix(kept.token_ids, token_ids) for kept in self._kept]
        # The last token is always computed: its logits are needed.
        reused = min(max(shared, default=0), len(token_ids) - 1)
        if not reused:
            # Without the config every layer keeps all tokens, so that sliding windows can be cropped too.
            return DynamicCache(), 0
        cache = copy.copy(self._kept[int(np.argmax(shared))].cache)
        # The tensors are shared and never written: a layer that grows makes new ones.
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        # Negative: recent versions of transformers take nothing else.
        if excess := cache.get_seq_length() - reused:
            cache.crop(-excess)
        return cache, reused

    @torch.inference_mode()
    def forward(self, token_ids: TokenIds, cache: DynamicCache, *, last_only: bool) -> Tensor:
        """Append ``[tokens]`` int64; return ``[tokens, vocabulary]`` float32, or ``[1, vocabulary]`` of the last."""
        ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None].to(self._model.device)
        arguments: dict[str, Any] = {self._cache_name: cache, **(self._last_only if last_only else {})}
        logits: Tensor = self._model(input_ids=ids, use_cache=True, **arguments).logits[0]
        return (logits[-1:] if last_only else logits).float()


class PlainAnswer:
    """A prompt whose KV is complete, and its answer.

    Parameters
    ----------
    model
        Runs the tokens.
    cache
        Of the prompt.
    reused
        How many leading tokens were not computed.

    Attributes
    ----------
    logits
        ``[vocabulary]`` float32 of the prompt's last token.
    """

    logits: Tensor

    def __init__(self, model: PlainModel, cache: DynamicCache, reused: int) -> None:
        self._model = model
        self._cache = cache
        self.reused = reused

    def greedy(self, tokens: int) -> tuple[tuple[int, ...], Tensor]:
        """Answer with the likeliest tokens, through any end of text.

        Returns
        -------
        tuple[tuple[int, ...], Tensor]
            The tokens, and the logits ``[tokens, vocabulary]`` before each.
        """
        rows = [self.logits]
        chosen = [int(self.logits.argmax())]
        while len(chosen) < tokens:
            rows.append(self._model.forward(np.array(chosen[-1:]), self._cache, last_only=True)[0])
            chosen.append(int(rows[-1].argmax()))
        return tuple(chosen), torch.stack(rows)

    def score(self, token_ids: tuple[int, ...]) -> Tensor:
        """Compute the logits ``[tokens, vocabulary]`` before each token of a given answer."""
        if len(token_ids) == 1:
            return self.logits[None]
        rows = self._model.forward(np.array(token_ids[:-1]), self._cache, last_only=False)
        return torch.cat([self.logits[None], rows])
