"""Text to token ids, piece by piece, so that a document has the same tokens wherever it stands."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvboost_rag.dummy_prefix import added_tokens, without_dummy_prefix
from kvboost_rag.types import TokenIds

__all__ = ["Tokens"]


class Tokens:
    """A tokenizer with the two ways in which prompts are read.

    Parameters
    ----------
    tokenizer
        Of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Whether special tokens are split is state of a fast tokenizer, which other threads and the caller may change
        # between setting and use: each of the two ways gets a copy of its own, used by one thread at a time.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._inside = without_dummy_prefix(self.tokenizer)
        self._splitting = copy.deepcopy(self._inside)
        self._added = added_tokens(tokenizer)
        self._lock = threading.Lock()
        self._start = self._leading_special_ids()
        self._forbidden = _forbidden(tokenizer)

    def template(self, text: str, *, first: bool = False) -> TokenIds:
        """Tokenise text of the prompt itself, in which special tokens keep their meaning.

        Parameters
        ----------
        text
            From one document to the next.
        first
            Whether the prompt begins with it. Later text has no space put before it by the tokenizer, except behind
            special tokens, as it would be in one long text.
        """
        inside = 0 if first or self._inside is self.tokenizer else self._until_added(text)
        with self._lock:
            ids = [_whole(self._inside, text[:inside]), _whole(self.tokenizer, text[inside:])]
        return np.concatenate(ids)

    def document(self, text: str) -> TokenIds:
        """Tokenise text of a document, in which template tokens are plain text and can forge nothing.

        Raises
        ------
        ValueError
            If the tokenizer reads a single character of the text as a template token.
        """
        return self._document(text).ids

    def document_with_offsets(self, text: str) -> tuple[TokenIds, list[tuple[int, int]] | None]:
        """Tokenise a document; the character range of each token is None for a tokenizer without offsets."""
        piece = self._document(text)
        return piece.ids, piece.offsets

    def _document(self, text: str) -> _Piece:
        """Tokenise, and again with the text cut inside every template token that came out, until none does."""
        cuts: set[int] = set()
        while True:
            ends = [0, *sorted(cuts), len(text)]
            piece = _joined([self._split_special(text[a:b]).moved(a) for a, b in itertools.pairwise(ends)])
            forged = {a + 1 for a, b in self._forged(text, piece) if b - a > 1} - cuts
            if not forged:
                break
            cuts |= forged
        if found := self._forbidden & set(piece.ids.tolist()):
            names = ", ".join(map(str, self.tokenizer.convert_ids_to_tokens(sorted(found))))
            raise ValueError(f"the tokenizer reads plain text as {names}; take it out of the document")
        return piece

    def _forged(self, text: str, piece: _Piece) -> list[tuple[int, int]]:
        """Tell where in the text template tokens came out."""
        found = self._forbidden.intersection(piece.ids.tolist())
        if piece.offsets is not None:
            return [span for i, span in zip(piece.ids.tolist(), piece.offsets, strict=True) if i in found]
        names = map(str, self.tokenizer.convert_ids_to_tokens(sorted(found)))
        return [match.span() for name in names for match in re.finditer(re.escape(name), text)]

    def _split_special(self, text: str) -> _Piece:
        fast = self.tokenizer.is_fast
        with self._lock:
            out = self._splitting(
                text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=fast
            )
        return _Piece(_ids(out.input_ids), list(out.offset_mapping) if fast else None)

    def start(self, text: str) -> TokenIds:
        """Token ids that the tokenizer puts before a raw prompt; none if the text already begins with them."""
        if not len(self._start):
            return self._start
        written = str(self.tokenizer.decode(self._start))
        return self._start[:0] if text.lstrip().startswith(written) else self._start

    def _until_added(self, text: str) -> int:
        found = self._added.search(text) if self._added else None
        return found.start() if found else len(text)

    def _leading_special_ids(self) -> TokenIds:
        plain: Sequence[int] = self.tokenizer("x", add_special_tokens=False).input_ids
        full: Sequence[int] = self.tokenizer("x").input_ids
        for i in range(len(full) - len(plain) + 1):
            if list(full[i : i + len(plain)]) == list(plain):
                return _ids(full[:i])
        return _ids([])


def _whole(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenIds:
    return _ids(tokenizer(text, add_special_tokens=False, split_special_tokens=False).input_ids if text else [])


@dataclass(frozen=True, eq=False)
class _Piece:
    ids: TokenIds
    offsets: list[tuple[int, int]] | None

    def moved(self, by: int) -> _Piece:
        return _Piece(self.ids, self.offsets and [(a + by, b + by) for a, b in self.offsets])


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    offsets = [piece.offsets for piece in pieces]
    whole = None if None in offsets else [span for spans in offsets for span in spans or []]
    return _Piece(np.concatenate([piece.ids for piece in pieces]), whole)


def _forbidden(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Name the ids that no text of a document may get: special tokens, and others that the template writes.

    Some tokens of templates are not declared special, as ``<tool_call>``, and ``split_special_tokens`` keeps them
    whole; and a unigram model puts special tokens together from their letters, whatever it is told.
    """
    template, added = str(tokenizer.chat_template or ""), tokenizer.added_tokens_decoder
    special = {i for i, t in added.items() if t.special or (len(t.content) > 1 and t.content in template)}
    return frozenset(special | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def _ids(ids: Sequence[int]) -> TokenIds:
    return np.asarray(ids, dtype=np.int64)
