"""A rendered prompt to its pieces: documents that are known, and everything between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvboost_rag.errors import UntrustedDocumentError
from kvboost_rag.prompt import Segment
from kvboost_rag.registry import Registered, Registry
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Document, Match, Piece

__all__ = ["Composer"]

NOT_INDEXED = "not indexed"
OTHER_TEXT = "its text differs from the indexed version"
NO_OFFSETS = "cut, and the tokenizer tells no character offsets"


class Composer:
    """Finds documents in text and tokenises every piece by itself.

    Parameters
    ----------
    registry
        The known documents.
    tokens
        The tokenizer.
    trusted_only
        Whether documents that are not known are refused.
    """

    def __init__(self, registry: Registry, tokens: Tokens, *, trusted_only: bool = False) -> None:
        self._registry = registry
        self._trusted_only = trusted_only
        self._tokens = tokens

    def pieces(self, segments: Sequence[Segment], *, raw: bool) -> list[Piece]:
        """Turn segments into pieces.

        Parameters
        ----------
        segments
            The rendered prompt.
        raw
            Whether the tokenizer's own beginning (as BOS) is still missing.

        Raises
        ------
        UntrustedDocumentError
            For a document that is not known as it is, if trusted ones alone are taken.
        """
        pieces, text = [], _Text(first=True)
        if raw:
            pieces.append(Piece(self._tokens.start("" if segments[0].document else segments[0].text)))
        for segment in segments:
            for part in self._parts(segment):
                if isinstance(part, Piece):
                    pieces += [self._between(text, goes_on=True), part]
                    text = _Text()
                else:
                    text.add(segment, *part)
        return _joined([*pieces, self._between(text)])

    def _parts(self, segment: Segment) -> Iterable[tuple[int, int] | Piece]:
        """Documents of a segment, and the ranges of its text around them."""
        if segment.document is not None:
            return [self._given(segment.document)]
        return self._found(segment.text) if segment.searchable else [(0, len(segment.text))]

    def _between(self, text: _Text, *, goes_on: bool = False) -> Piece:
        return Piece(self._tokens.template(text.text, text.cuts, first=text.first, goes_on=goes_on))

    def _given(self, document: Document) -> Piece:
        """Make the piece of a document that the caller handed over apart."""
        text = document.text.strip()
        known = self._registry.get(document.id)
        if known is None:
            known, reason = self._by_text(text), NOT_INDEXED
        else:
            reason = OTHER_TEXT
        if known is None or known.text != text:
            if self._trusted_only:
                raise UntrustedDocumentError(
                    f"document {document.id!r} can not be used: {reason}, and trusted_only takes nothing else; have "
                    "its owner add it with add_documents"
                )
            return Piece(self._tokens.document(text), document.id, reason=reason)
        return self._whole(known)

    def _by_text(self, text: str) -> Registered | None:
        for registered, match in self._registry.locate(text):
            if match.complete and match.end - match.start == len(text):
                return registered
        return None

    def _found(self, text: str) -> Iterator[tuple[int, int] | Piece]:
        """Cut text around the documents it holds."""
        done = 0
        for registered, match in self._registry.locate(text):
            yield done, match.start
            piece, done = self._located(registered, match)
            yield piece
        yield done, len(text)

    def _located(self, registered: Registered, match: Match) -> tuple[Piece, int]:
        """Make the piece of a located document; also return where the text goes on behind it."""
        if match.complete:
            return self._whole(registered), match.end
        length = match.end - match.start
        ids, offsets = self._tokens.document_with_offsets(registered.text)
        if offsets is None:
            cut = registered.text[:length]
            return Piece(self._tokens.document(cut), registered.document.id, reason=NO_OFFSETS), match.end
        # Only whole tokens of the document are a hit; what the cut left of the next one is text that follows.
        whole = next((i for i, (_, end) in enumerate(offsets) if end > length), len(offsets))
        end = offsets[whole - 1][1] if whole else 0
        return Piece(ids[:whole], registered.document.id, registered.chunks), match.start + end

    def _whole(self, registered: Registered) -> Piece:
        chunks = registered.chunks
        ids = np.concatenate([c.token_ids for c in chunks]) if chunks else self._tokens.document(registered.text)
        return Piece(ids, registered.document.id, chunks)


class _Text:
    """Text between two documents, tokenised as one wherever it came from, and where it must be cut for that."""

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.text = ""
        self.cuts: list[int] = []

    def add(self, segment: Segment, start: int, end: int) -> None:
        """Append a range of a segment's text."""
        self.cuts += [len(self.text) + cut - start for cut in segment.cuts if start < cut < end]
        self.text += segment.text[start:end]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Drop empty pieces and join neighbouring text."""
    out: list[Piece] = []
    for piece in pieces:
        if not len(piece.token_ids):
            continue
        if out and piece.document_id is None and out[-1].document_id is None:
            out[-1] = Piece(np.concatenate([out[-1].token_ids, piece.token_ids]))
        else:
            out.append(piece)
    return out
