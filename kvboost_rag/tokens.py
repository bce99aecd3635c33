"""Text to token ids, piece by piece, so that a document has the same tokens wherever it stands."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

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
        self._splitting = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._start = self._leading_special_ids()
        self._forgeable = _forgeable(tokenizer)

    def template(self, text: str) -> TokenIds:
        """Tokenise text of the prompt itself, in which special tokens keep their meaning."""
        with self._lock:
            return _ids(self.tokenizer(text, add_special_tokens=False, split_special_tokens=False).input_ids)

    def document(self, text: str) -> TokenIds:
        """Tokenise text of a document, in which template tokens are plain text and can forge nothing."""
        return np.concatenate([self._split_special(part).ids for part in self._harmless(text)])

    def document_with_offsets(self, text: str) -> tuple[TokenIds, list[tuple[int, int]] | None]:
        """Tokenise a document; the character range of each token is None for a tokenizer without offsets."""
        if not self.tokenizer.is_fast:
            return self.document(text), None
        ids, offsets, base = [], [], 0
        for part in self._harmless(text):
            piece = self._split_special(part)
            ids.append(piece.ids)
            offsets += [(base + a, base + b) for a, b in piece.offsets or []]
            base += len(part)
        return np.concatenate(ids), offsets

    def _split_special(self, text: str) -> _Piece:
        fast = self.tokenizer.is_fast
        with self._lock:
            out = self._splitting(
                text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=fast
            )
        return _Piece(_ids(out.input_ids), list(out.offset_mapping) if fast else None)

    def _harmless(self, text: str) -> list[str]:
        """Cut a text inside every template token that the tokenizer would not split by itself."""
        if self._forgeable is None:
            return [text]
        cuts = [0, *(match.start() + 1 for match in self._forgeable.finditer(text)), len(text)]
        return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if b > a] or [text]

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


def _forgeable(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Find template tokens that are not declared special, as ``<tool_call>``: ``split_special_tokens`` keeps them."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    names = [t.content for t in added if not t.special and len(t.content) > 1 and t.content in template]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _ids(ids: Sequence[int]) -> TokenIds:
    return np.asarray(ids, dtype=np.int64)
