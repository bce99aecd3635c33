"""Text to token ids, piece by piece, so that a document has the same tokens wherever it stands."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvboost_rag.dummy_prefix import added_tokens, without_dummy_prefix
from kvboost_rag.forgery import Forgery, Offsets, Tokenise, parts_of
from kvboost_rag.types import TokenIds

__all__ = ["Tokens"]

_WORD = "x"
"""Stands for whatever a document begins with."""


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
        self._added = None if self._inside is self.tokenizer else added_tokens(tokenizer)
        self._lock = threading.Lock()
        self._start = self._leading_special_ids()
        self._word = self._continued(_WORD)
        self._forgery = Forgery(tokenizer)

    def template(
        self, text: str, cuts: Sequence[int] = (), *, first: bool = False, goes_on: bool = False
    ) -> TokenIds:
        """Tokenise text of the prompt itself, in which special tokens keep their meaning where it is not cut.

        Parameters
        ----------
        text
            From one document to the next.
        cuts
            Places where it is read in two.
        first
            Whether the prompt begins with it. Later text has no space put before it by the tokenizer, except behind
            special tokens, as it would be in one long text.
        goes_on
            Whether a document follows: line breaks are read otherwise before a word than at the end of a text.
        """
        *others, last = parts_of(text, cuts)
        read = [self._part(part, first=first and not i) for i, part in enumerate(others)]
        end = self._before_word if goes_on else self._part
        return np.concatenate([*read, end(last, first=first and not others)])

    def _part(self, text: str, *, first: bool) -> TokenIds:
        return self._read(self.tokenizer, text).ids if first else self._continued(text)

    def _before_word(self, text: str, *, first: bool) -> TokenIds:
        """Tokenise text as it is read before a word, unless its end would share a token with the word."""
        longer, rest = self._part(text + _WORD, first=first), len(self._word)
        if text and np.array_equal(longer[-rest:], self._word):
            return longer[:-rest]
        return self._part(text, first=first)

    def _continued(self, text: str) -> TokenIds:
        """Tokenise text that stands behind other text."""
        if self._inside is self.tokenizer:
            return self._read(self.tokenizer, text).ids
        found = self._added.search(text) if self._added else None
        end = found.start() if found else len(text)
        parts = (self._inside, text[:end]), (self.tokenizer, text[end:])
        return np.concatenate([self._read(tokenizer, part).ids for tokenizer, part in parts if part] or [_ids([])])

    def cuts(self, text: str, *, markup: bool = True) -> list[int]:
        """Return where :meth:`template` has to cut a text that others wrote, so that it forges no template token.

        Parameters
        ----------
        text
            Of a message.
        markup
            False leaves their meaning to tokens that answers and instructions hold, as ``<tool_call>``.
        """
        return self._forgery.cuts(text, self._offsets(self.tokenizer), markup=markup)

    def document(self, text: str) -> TokenIds:
        """Tokenise text of a document, in which template tokens are plain text and can forge nothing."""
        return np.concatenate([piece.ids for piece in self._read_all(self._splitting, self._harmless(text))])

    def document_with_offsets(self, text: str) -> tuple[TokenIds, list[tuple[int, int]] | None]:
        """Tokenise a document; the character range of each token is None for a tokenizer without offsets."""
        if not self.tokenizer.is_fast:
            return self.document(text), None
        offsets, base = [], 0
        parts = self._harmless(text)
        pieces = self._read_all(self._splitting, parts)
        for part, piece in zip(parts, pieces, strict=True):
            offsets += [(base + a, base + b) for a, b in piece.offsets or []]
            base += len(part)
        return np.concatenate([piece.ids for piece in pieces]), offsets

    def _harmless(self, text: str) -> list[str]:
        return parts_of(text, self._forgery.cuts(text, self._offsets(self._splitting)))

    def _offsets(self, tokenizer: PreTrainedTokenizerBase) -> Tokenise | None:
        if not tokenizer.is_fast:
            return None
        return lambda texts: [piece.named_offsets() for piece in self._read_all(tokenizer, texts)]

    def _read(self, tokenizer: PreTrainedTokenizerBase, text: str) -> _Piece:
        return self._read_all(tokenizer, [text])[0]

    def _read_all(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[_Piece]:
        """Tokenise texts in one call: text made of forged tokens has thousands of parts."""
        fast, split = tokenizer.is_fast, tokenizer is self._splitting
        with self._lock:
            out = tokenizer(texts, add_special_tokens=False, split_special_tokens=split, return_offsets_mapping=fast)
        offsets = out.offset_mapping if fast else [None] * len(texts)
        return [_Piece(_ids(ids), places) for ids, places in zip(out.input_ids, offsets, strict=True)]

    def start(self, text: str) -> TokenIds:
        """Token ids that the tokenizer puts before a raw prompt; none if the text already begins with them."""
        if not len(self._start):
            return self._start
        written = str(self.tokenizer.decode(self._start))
        return self._start[:0] if text.lstrip().startswith(written) else self._start

    def _leading_special_ids(self) -> TokenIds:
        plain: Sequence[int] = self.tokenizer("x", add_special_tokens=False).input_ids
        full: Sequence[int] = self.tokenizer("x").input_ids
        for i in range(len(full) - len(plain) + 1):
            if list(full[i : i + len(plain)]) == list(plain):
                return _ids(full[:i])
        return _ids([])


@dataclass(frozen=True, eq=False)
class _Piece:
    ids: TokenIds
    offsets: list[tuple[int, int]] | None

    def named_offsets(self) -> Offsets:
        return [(token_id, a, b) for token_id, (a, b) in zip(self.ids.tolist(), self.offsets or (), strict=True)]


def _ids(ids: Sequence[int]) -> TokenIds:
    return np.asarray(ids, dtype=np.int64)
