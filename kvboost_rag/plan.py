"""Which parts of a prompt are reused, and from where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvboost_rag.keys import chain
from kvboost_rag.prefix import PrefixHit
from kvboost_rag.store import ChunkStore
from kvboost_rag.types import Chunk, Piece, Placement, Plan, Span, SpanKind, TokenIds

__all__ = ["Planner", "missed"]

EARLIER_TURN = "computed over approximate documents in an earlier prompt"
EARLIER_REPAIR = "repaired in an earlier prompt"
NOT_STORED = "its KV is not in the store"
OTHER_HISTORY = "encoded after another history"
OTHER_DOCUMENT = "the same tokens, encoded in another document"
STORED_AS = "stored as {}"
LAST_TOKEN = "the last token is always computed"
BEHIND_HEAD = "right behind the head, where its first tokens are computed exactly"

_FIRST_TOKENS = 16
"""With these 7 tenths of what an exact document at the first place gives, in the mean (``docs/repair-frontier.md``)."""


@dataclass(frozen=True)
class Planner:
    """Looks up every piece of a prompt.

    Parameters
    ----------
    store
        Holds the chunks.
    seed
        Prefix key of no tokens at all.
    context_key
        Prefix key of the canonical context.
    head_key
        Prefix key of the head, if the canonical context is longer. The document right behind the head is the one
        whose history differs most from that context, and every other token of the prompt looks at its first tokens:
        they are computed, which makes them exact.
    """

    store: ChunkStore
    seed: str
    context_key: str
    head_key: str | None = None

    def plan(self, pieces: Sequence[Piece], hit: PrefixHit | None) -> Plan:
        """Decide for every token of a prompt.

        Parameters
        ----------
        pieces
            The prompt; at least one token.
        hit
            An earlier prompt that begins alike.
        """
        ids = np.concatenate([piece.token_ids for piece in pieces])
        reused = min(hit.tokens, len(ids) - 1) if hit else 0
        spans: list[Span] = []
        placements: list[Placement] = []
        start = 0
        for piece in pieces:
            end = start + len(piece.token_ids)
            if hit and start < reused:
                spans += _from_prefix(hit, start, min(end, reused), piece.document_id)
            if end > reused:
                planned = list(self._piece(piece, ids, start, max(start, reused)))
                spans += _merged([span for span, _ in planned])
                placements += [placement for _, placement in planned if placement]
            start = end
        return Plan(ids, tuple(_last_computed(spans)), tuple(placements), reused)

    def _piece(
        self, piece: Piece, ids: TokenIds, start: int, first: int
    ) -> Iterator[tuple[Span, Placement | None]]:
        """Plan the tokens from ``first`` on of a piece that begins at ``start``."""
        end = start + len(piece.token_ids)
        if not piece.chunks:
            yield Span(first, end, SpanKind.COMPUTED, piece.document_id, piece.reason), None
            return
        history = chain(self.seed, ids[:start])
        edge = min(end, start + _FIRST_TOKENS)
        if history == self.head_key and first < edge:
            yield Span(first, edge, SpanKind.COMPUTED, piece.document_id, BEHIND_HEAD), None
            first = edge
        same_history = history == self.context_key
        for chunk in piece.chunks:
            begin, stop = max(start, first), min(start + len(chunk.token_ids), end)
            if begin < stop:
                yield self._chunk(chunk, piece.document_id, same_history, begin, stop, begin - start)
            start += len(chunk.token_ids)

    def _chunk(
        self, chunk: Chunk, document_id: str | None, same_history: bool, begin: int, stop: int, offset: int
    ) -> tuple[Span, Placement | None]:
        entry = self.store.get(chunk.key.prefix, chunk.token_ids)
        reasons = [] if same_history else [OTHER_HISTORY]
        if entry is None:
            entry = self.store.find(chunk.key.content, chunk.token_ids)
            same_history, reasons = False, [OTHER_DOCUMENT]
        if entry is None:
            return Span(begin, stop, SpanKind.COMPUTED, document_id, NOT_STORED), None
        if entry.kv_dtype != "native":
            reasons.append(STORED_AS.format(entry.kv_dtype))
        kind = SpanKind.APPROXIMATE if reasons else SpanKind.EXACT
        placement = Placement(begin, entry, offset, offset + stop - begin, same_history)
        return Span(begin, stop, kind, document_id, "; ".join(reasons)), placement


def missed(spans: Sequence[Span]) -> Iterator[str]:
    """Ids of documents that are known and whose KV is not all stored, some perhaps twice."""
    return (s.document_id for s in spans if s.reason == NOT_STORED and s.document_id is not None)


def _from_prefix(hit: PrefixHit, start: int, end: int, document_id: str | None) -> Iterator[Span]:
    """Describe reused tokens ``start .. end - 1`` of an earlier prompt."""
    if start < hit.exact:
        yield Span(start, min(end, hit.exact), SpanKind.EXACT, document_id)
        start = min(end, hit.exact)
    for span in hit.prefix.spans:
        begin, stop = max(start, span.start), min(end, span.end)
        if begin >= stop:
            continue
        reason = EARLIER_REPAIR if span.kind is SpanKind.RECOMPUTED else span.reason or EARLIER_TURN
        yield Span(begin, stop, SpanKind.APPROXIMATE, document_id, reason)


def _last_computed(spans: list[Span]) -> list[Span]:
    """Give the last token to the forward, which has to return its logits."""
    last = spans[-1]
    if last.kind is SpanKind.COMPUTED:
        return spans
    kept = [replace(last, end=last.end - 1)] if last.tokens > 1 else []
    return [*spans[:-1], *kept, Span(last.end - 1, last.end, SpanKind.COMPUTED, last.document_id, LAST_TOKEN)]


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Join the chunks of one piece that share a history, so that each approximate span begins at a seam."""
    current = spans[0]
    for span in spans[1:]:
        apart = any(s.reason.startswith((OTHER_DOCUMENT, BEHIND_HEAD)) for s in (current, span))
        if span.kind is current.kind and not apart:
            # A chunk too short to be quantised has the shorter reason of the two.
            current = replace(current, end=span.end, reason=max(current.reason, span.reason, key=len))
        else:
            yield current
            current = span
    yield current
