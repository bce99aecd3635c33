"""KV of earlier prompts, for prompts that begin with the same tokens: the head, and the turns of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvboost_rag.model import KVCache
from kvboost_rag.types import Span, SpanKind, TokenIds

__all__ = ["Prefix", "PrefixCache", "PrefixHit", "common_prefix"]

logger = logging.getLogger("kvboost_rag.prefix")


@dataclass(frozen=True, eq=False)
class Prefix:
    """A computed prompt.

    Parameters
    ----------
    token_ids
        Prompt and answer.
    cache
        Their KV; slots beyond ``len(token_ids)`` mean nothing.
    spans
        Where each part's KV came from.
    repair
        Specification of the repair that made the parts that are not exact.
    pinned
        Whether it stays whatever the budget says.
    """

    token_ids: TokenIds
    cache: KVCache
    spans: tuple[Span, ...]
    repair: str
    pinned: bool = False

    @property
    def exact_tokens(self) -> int:
        """How many leading tokens have exactly the KV of a full prefill."""
        inexact = (SpanKind.APPROXIMATE, SpanKind.RECOMPUTED)
        return next((s.start for s in self.spans if s.kind in inexact), len(self.token_ids))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, which may be longer than this prompt."""
        return int(sum(t.untyped_storage().nbytes() for t in (self.cache.keys, self.cache.values)))

    def tightened(self, max_bytes: int) -> Prefix:
        """Copy to buffers of its own size, if it exceeds a budget only because its buffers are longer."""
        own = self.cache.keys.nbytes + self.cache.values.nbytes
        if self.nbytes <= max_bytes or own > max_bytes:
            return self
        return replace(self, cache=KVCache(self.cache.keys.clone(), self.cache.values.clone()))


@dataclass(frozen=True, eq=False)
class PrefixHit:
    """The first ``tokens`` tokens of a stored prefix, of which the first ``exact`` are exact."""

    prefix: Prefix
    tokens: int
    exact: int


class PrefixCache:
    """The most recently used prompts, under a byte budget.

    Only a prompt that begins with the very same tokens is ever served from here, so what one prompt leaves behind
    can not reach another through a shared document (the HijackKV attack on content keys).

    Parameters
    ----------
    max_bytes
        Budget; the pinned canonical context is not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_prefix_bytes is {max_bytes}; give 0 to keep no prompt, or a number of bytes")
        self._max_bytes = max_bytes
        self._space = ""
        self._entries: list[Prefix] = []
        self._elsewhere: dict[str, list[Prefix]] = {}

    def enter(self, space: str) -> bool:
        """Serve and keep the prompts of another state of the model alone; whether it is new here."""
        if space == self._space:
            return False
        self._elsewhere[self._space] = self._entries
        is_new = space not in self._elsewhere
        self._space, self._entries = space, self._elsewhere.pop(space, [])
        return is_new

    def drop(self, space: str) -> None:
        """Forget the prompts of a state of the model that is not the one entered last."""
        self._elsewhere.pop(space, None)

    def match(self, token_ids: TokenIds, repair: str) -> PrefixHit | None:
        """Find the entry that shares the most leading tokens.

        Parts that are not exact count only when the same repair made them: another one was asked for otherwise.
        """
        best: PrefixHit | None = None
        for entry in self._entries:
            shared = common_prefix(entry.token_ids, token_ids)
            exact = min(shared, entry.exact_tokens)
            usable = shared if entry.repair == repair else exact
            if usable and (best is None or usable > best.tokens):
                best = PrefixHit(entry, usable, exact)
        if best is not None and not best.prefix.pinned:
            self._entries.remove(best.prefix)
            self._entries.append(best.prefix)
        return best

    def put(self, prefix: Prefix) -> bool:
        """Keep a prompt; those it extends go, then the least recently used. False if it exceeds the budget."""
        prefix = prefix.tightened(self._max_bytes)
        if not prefix.pinned and prefix.nbytes > self._max_bytes:
            logger.info("a prompt of %d bytes exceeds max_prefix_bytes and is not kept", prefix.nbytes)
            return False
        self._entries = [e for e in self._entries if e.pinned or not _extends(prefix, e)]
        self._entries.append(prefix)
        while self.nbytes > self._max_bytes:
            self._evict()
        return True

    def _evict(self) -> None:
        """Drop the prompt that was used longest ago, of other states of the model first."""
        held = next(kept for kept in self._all() if any(not e.pinned for e in kept))
        held.remove(next(e for e in held if not e.pinned))

    def _all(self) -> list[list[Prefix]]:
        return [*self._elsewhere.values(), self._entries]

    def forget_documents(self, document_ids: Sequence[str]) -> None:
        """Drop every prompt that holds one of these documents."""
        gone = set(document_ids)
        for entries in self._all():
            entries[:] = [e for e in entries if not any(s.document_id in gone for s in e.spans)]

    def clear(self) -> None:
        """Drop everything."""
        self._elsewhere.clear()
        self._entries.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that are not pinned."""
        return sum(entry.nbytes for entries in self._all() for entry in entries if not entry.pinned)


def common_prefix(one: TokenIds, other: TokenIds) -> int:
    """Count the leading tokens that two sequences share."""
    width = min(len(one), len(other))
    different = np.flatnonzero(one[:width] != other[:width])
    return int(different[0]) if len(different) else width


def _extends(new: Prefix, old: Prefix) -> bool:
    return new.repair == old.repair and common_prefix(new.token_ids, old.token_ids) == len(old.token_ids)
