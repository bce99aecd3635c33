"""Turns a growing list of token ids into text, a piece a token."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"
# Decoders treat the first token of a list differently, so some tokens are decoded again in front of new ones.
_CONTEXT = 4
# A UTF-8 character has at most this many bytes, so a border with as many tokens behind it does not move any more.
_CHARACTER = 4
_MOST_PENDING = 16
# What transformers' clean-up takes the spaces out of, in its order.
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# Only spaces go, so text can be cut after any character that no pattern goes on after, and both sides cleaned apart.
_INSIDE_CLEAN_UP = "".join(pattern[:-1] for pattern in _CLEAN_UP)
_CLEAN_UP_PROBE = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're"


class Detokenizer:
    """Decode token by token.

    The pieces of `push` and the last one of `flush`, joined, are ``tokenizer.decode(ids, skip_special_tokens=True)`` of
    all ids pushed. The work for a token does not depend on how many came before.

    Text is held back while a later token could still change it: an incomplete UTF-8 character; byte tokens such as
    ``<0xE4>`` until another token follows, since SentencePiece's decoder takes a run of them as a whole; and, where the
    tokenizer has ``clean_up_tokenization_spaces`` on, spaces, apostrophes and the letters n, v and r at the end.

    Parameters
    ----------
    tokenizer
        The model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = set(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        self._cleans = _cleans_up(tokenizer)
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = 0
        self._unclean = ""

    def push(self, token_id: int) -> str:
        """Take the next token.

        Parameters
        ----------
        token_id
            Special tokens and ids that the tokenizer does not know have no text.

        Returns
        -------
        str
            The text that is certain now, often but not always the token's own; possibly empty.
        """
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id in self._special:
            return ""
        self._pending.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(str(token)) else self._clean(self._advance())

    def flush(self) -> str:
        """Give what was held back; nothing may be pushed afterwards."""
        rest = self._decode(self._context, self._pending)[self._given :]
        self._pending = []
        self._given = 0
        return self._clean(rest, final=True)

    def _advance(self) -> str:
        text = self._decode(self._context, self._pending)
        certain = len(text) - text.endswith(_BROKEN)
        piece, self._given = text[self._given : certain], certain
        if certain == len(text):
            self._context = (self._context + self._pending)[-_CONTEXT:]
            self._pending = []
            self._given = 0
        elif len(self._pending) > _MOST_PENDING:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Move pending tokens into the context although the text still ends in a broken character."""
        last = len(self._pending) - _CHARACTER
        for cut in range(last, last - _CHARACTER, -1):
            context = (self._context + self._pending[:cut])[-_CONTEXT:]
            head = self._decode(self._context, self._pending[:cut])
            tail = self._decode(context, self._pending[cut:])
            if tail and head + tail == text:
                self._context = context
                self._pending = self._pending[cut:]
                self._given -= len(head)
                return

    def _decode(self, context: list[int], ids: list[int]) -> str:
        return self._raw(context + ids)[len(self._raw(context)) :]

    def _raw(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _clean(self, text: str, final: bool = False) -> str:
        if not self._cleans:
            return text
        text = self._unclean + text
        certain = len(text) if final else len(text.rstrip(_INSIDE_CLEAN_UP))
        self._unclean = text[certain:]
        text = text[:certain]
        for pattern in _CLEAN_UP:
            text = text.replace(pattern, pattern.replace(" ", ""))
        return text


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Which tokenizers obey the flag differs between releases of transformers, so this one is asked.
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    ids = tokenizer.encode(_CLEAN_UP_PROBE, add_special_tokens=False)
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False))
