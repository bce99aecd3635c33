"""Turns a growing list of token ids into text, a piece a token."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"
# Only the latest tokens are decoded again with a new one. The oldest of them may come out differently than in full (a
# leading space stripped, a character cut); a UTF-8 character has at most 4 bytes, so the ones after them do not.
_CONTEXT = 8
_MOST_TOKENS = 16
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
        self._window: list[int] = []
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
        self._window.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(str(token)) else self._clean(self._advance())

    def flush(self) -> str:
        """Give what was held back; nothing may be pushed afterwards."""
        return self._clean(self._raw(self._window)[self._given :], final=True)

    def _advance(self) -> str:
        text = self._raw(self._window)
        certain = len(text) - text.endswith(_BROKEN)
        piece, self._given = text[self._given : certain], certain
        if len(self._window) > _MOST_TOKENS:
            self._window = self._window[-_CONTEXT:]
            self._given = len(self._raw(self._window)) - (len(text) - certain)
        return piece

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
