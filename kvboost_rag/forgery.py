"""Template tokens that stand in text which others wrote: where to cut it so that they stay plain text.

Two kinds are told apart. Control tokens begin and end turns: those declared special, and those that look like
``<|...|>``. Markup is what else of the added tokens stands in the chat template, as ``<tool_call>`` or ``<think>``:
answers and instructions hold it rightly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["Forgery", "Offsets", "Tokenise", "parts_of"]

Offsets = list[tuple[int, int, int]]
"""Id and character range of each token of a text."""

Tokenise = Callable[[list[str]], list[Offsets]]

_CONTROL = ("<|", "<｜")


class Forgery:
    """Finds template tokens in text.

    Parameters
    ----------
    tokenizer
        Of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = str(tokenizer.chat_template or "")
        control, all_ids = set(tokenizer.all_special_ids), set(tokenizer.all_special_ids)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            # Runs of white space are added tokens of some tokenizers, and forge nothing.
            if token.special or token.content.startswith(_CONTROL):
                control.add(token_id)
                all_ids.add(token_id)
            elif token.content.strip() and token.content in template:
                all_ids.add(token_id)
        self._normalise = _normaliser(tokenizer)
        self._ids = {False: frozenset(control), True: frozenset(all_ids)}
        self._names = {markup: self._pattern(tokenizer, ids) for markup, ids in self._ids.items()}

    def _pattern(self, tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> re.Pattern[str] | None:
        written = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids]
        names = {name for text in written for name in (text, self._normalise(text)) if len(name.strip()) > 1}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None

    def cuts(self, text: str, tokenise: Tokenise | None, *, markup: bool = True) -> list[int]:
        """Return where to cut a text so that no part of it holds a template token.

        Parameters
        ----------
        text
            As somebody wrote it.
        tokenise
            Tokenises texts; None if the tokenizer does not know the tokens' ranges.
        markup
            Whether markup counts as well, or control tokens only.

        Returns
        -------
        list[int]
            Places inside the text, ascending.
        """
        names = self._names[markup]
        if names is None:
            return []
        cuts = list(_inside(names, text))
        if tokenise is not None and names.search(self._normalise(text)):
            # What looks otherwise may be the same to the tokenizer, for example a full-width letter.
            return self._refined(text, cuts, tokenise, self._ids[markup])
        return cuts

    def _refined(self, text: str, cuts: list[int], tokenise: Tokenise, ids: Collection[int]) -> list[int]:
        """Cut all that the tokenizer finds at once, until it finds nothing in any part; a few rounds do."""
        while True:
            found = set(_found(parts_of(text, cuts), tokenise, ids))
            if not found:
                return cuts
            cuts = sorted({*cuts, *found})


def parts_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Cut a text at ascending places; an empty text is one part."""
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def _inside(names: re.Pattern[str], text: str) -> Iterator[int]:
    """Cut every name behind its first character, also one that begins inside another."""
    place = 0
    while (match := names.search(text, place)) is not None:
        place = match.start() + 1
        yield place


def _found(parts: list[str], tokenise: Tokenise, ids: Collection[int]) -> Iterator[int]:
    base = 0
    for part, tokens in zip(parts, tokenise(parts), strict=True):
        for token_id, start, end in tokens:
            # White space around a token may count to it; a single character can not be cut.
            start += len(part[start:end]) - len(part[start:end].lstrip())
            if token_id in ids and end - start > 1:
                yield base + start + 1
        base += len(part)


def _normaliser(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    normaliser = getattr(backend, "normalizer", None)
    return str if normaliser is None else normaliser.normalize_str
