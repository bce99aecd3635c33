"""What an engine's documents are encoded after, as texts and as tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvboost_rag.generic_texts import CONTEXT_TEXTS, PROBE_TEXT
from kvboost_rag.prompt import Renderer
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import TokenIds

__all__ = ["context_ids", "context_texts", "other_context_ids"]

logger = logging.getLogger("kvboost_rag")


def context_texts(texts: Sequence[str] | Literal["generic"]) -> tuple[str, ...]:
    """Resolve ``context_documents`` of the engine.

    Raises
    ------
    ValueError
        For a lone text, which is a sequence of texts of one letter each.
    """
    if texts == "generic":
        return CONTEXT_TEXTS
    if isinstance(texts, str):
        raise ValueError("context_documents is a list of texts, or 'generic'; put a single text into a list")
    return tuple(texts)


def context_ids(renderer: Renderer, tokens: Tokens, contexts: Sequence[str]) -> TokenIds:
    """Compose head and contexts as they stand in a prompt, ``[tokens]`` int64."""
    try:
        head = renderer.head
    except ValueError as error:
        logger.warning("documents are encoded without a head, so none is ever exact: %s", error)
        ids = []
    else:
        ids = [] if renderer.uses_template else [tokens.start(head)]
        ids.append(tokens.template(head, first=True, goes_on=True))
    for text in contexts:
        ids += [tokens.document(text.strip()), tokens.template(renderer.separator, goes_on=True)]
    return np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)


def other_context_ids(renderer: Renderer, tokens: Tokens, contexts: Sequence[str]) -> TokenIds:
    """Compose the other context of the sensitivity measurement, ``[tokens]`` int64, at least one.

    It differs from the canonical context as much as it can: the head alone where documents are encoded behind texts,
    the head and a text where they are not. From one text to another, little changes that tells the tokens apart.
    """
    if contexts and len(head := context_ids(renderer, tokens, ())):
        return head
    return context_ids(renderer, tokens, [_probe(contexts)])


def _probe(contexts: Sequence[str]) -> str:
    """After the same text as before, nothing would change."""
    return PROBE_TEXT if PROBE_TEXT not in contexts else CONTEXT_TEXTS[0]
