"""What documents are encoded after, and its KV.

Behind one text, a document's KV holds what that very text does to it. Behind several of them side by side it holds
their mean, and is nearer to what yet another text would do. Side by side means: each stands right behind the head and
sees nothing of the others, all end where the document begins, and attention to each is divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvboost_rag.keys import chain, prefix_seed
from kvboost_rag.model import Columns, KVCache, ModelRunner
from kvboost_rag.types import TokenIds

__all__ = ["CanonicalContext", "ContextKV"]


@dataclass(frozen=True, eq=False)
class CanonicalContext:
    """What every document is encoded after.

    Parameters
    ----------
    head
        Beginning of text, template, system text, lead-in: ``[tokens]`` int64.
    texts
        Each stands right behind the head, side by side with the others; ``[tokens]`` int64.
    key
        Prefix key of all of it; part of the identity of every chunk encoded after it.
    """

    head: TokenIds
    texts: Sequence[TokenIds]
    key: str

    @classmethod
    def of(cls, fingerprint: str, head: TokenIds, texts: Sequence[TokenIds] = ()) -> CanonicalContext:
        """Make the context of these tokens for the model with this fingerprint."""
        if len(texts) < 2:
            return cls(head, texts, chain(prefix_seed(fingerprint), np.concatenate([head, *texts])))
        # No prompt holds texts side by side, so that no prompt's key may be this one; nor may that of a chunk behind
        # fewer texts.
        key = prefix_seed(f"{len(texts)} side by side, {fingerprint}")
        for ids in (head, *texts):
            key = chain(key, ids)
        return cls(head, texts, key)

    @property
    def token_ids(self) -> TokenIds:
        """What a prompt can begin with: the head, and the text behind it where there is but one."""
        return np.concatenate([self.head, *self.texts]) if len(self.texts) == 1 else self.head

    @property
    def length(self) -> int:
        """The position at which documents begin."""
        return len(self.head) + max(map(len, self.texts), default=0)


@dataclass(frozen=True, eq=False)
class ContextKV:
    """KV of a canonical context.

    Parameters
    ----------
    context
        Whose.
    runner
        Computes it.

    Attributes
    ----------
    cache
        The head, then one text after the other, each as it is behind the head alone.
    columns
        What attention has to know of these slots; None where each slot is its own position.
    """

    context: CanonicalContext
    runner: ModelRunner
    cache: KVCache = field(init=False)
    columns: Columns | None = field(init=False)

    def __post_init__(self) -> None:
        """Compute it."""
        head, texts = len(self.context.head), self.context.texts
        if len(texts) < 2:
            cache, columns = self._encoded(self.context.token_ids, torch.arange(self.context.length)), None
        else:
            positions = [self._positions(len(text)) for text in texts]
            alone = [
                self._encoded(np.concatenate([self.context.head, text]), own)
                for text, own in zip(texts, positions, strict=True)
            ]
            cache = _joined([alone[0].sliced(0, head), *(kv.sliced(head, kv.capacity) for kv in alone)])
            columns = Columns(
                torch.cat([torch.arange(head), *(own[head:] for own in positions)]),
                torch.cat([torch.zeros(head), torch.full((cache.capacity - head,), -math.log(len(texts)))]),
            )
        object.__setattr__(self, "cache", cache)
        object.__setattr__(self, "columns", columns)

    def _positions(self, tokens: int) -> torch.Tensor:
        """Positions of the head and of a text of so many tokens that ends where documents begin."""
        head, end = len(self.context.head), self.context.length
        return torch.cat([torch.arange(head), torch.arange(end - tokens, end)])

    def _encoded(self, token_ids: TokenIds, positions: torch.Tensor) -> KVCache:
        cache = self.runner.new_cache(len(token_ids))
        if len(token_ids):
            ids, positions = (t.to(self.runner.device) for t in (torch.from_numpy(token_ids), positions))
            slots = torch.arange(len(token_ids), device=self.runner.device)
            columns = Columns(positions, torch.zeros_like(positions, dtype=torch.float32))
            is_plain = bool((positions == slots).all())
            self.runner.encode(ids[None], positions, slots, cache, len(token_ids), None if is_plain else columns)
        return cache


def _joined(parts: Iterable[KVCache]) -> KVCache:
    listed = list(parts)
    return KVCache(torch.cat([p.keys for p in listed], dim=3), torch.cat([p.values for p in listed], dim=3))
