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

__all__ = ["context_texts", "head_ids", "other_context_ids", "text_ids"]

logger = logging.getLogger("kvboost_rag")


def context_texts(texts: Sequence[str] | Literal["generic"]) -> tuple[str, ...]:
    """Resolve ``context_documents`` of the engine.

    Raises
    ------
    ValueError
        For a lone text, which is a sequence of texts of one letter each, and for one that holds nothing.
    """
    if texts == "generic":
        return CONTEXT_TEXTS
    if isinstance(texts, str):
        raise ValueError("context_documents is a list of texts, or 'generic'; put a single text into a list")
    blank = next((i for i, text in enumerate(texts) if not text.strip()), None)
    if blank is not None:
        raise ValueError(f"context_documents[{blank}] holds no text; leave it out, for it would count as one of them")
    return tuple(texts)


def head_ids(renderer: Renderer, tokens: Tokens) -> TokenIds:
    """Compose the head as it stands in a prompt, ``[tokens]`` int64; empty, with a warning, where there is none."""
    try:
        head = renderer.head
    except ValueError as error:
        logger.warning("documents are encoded without a head, so none is ever exact: %s", error)
        return np.empty(0, dtype=np.int64)
    start = [] if renderer.uses_template else [tokens.start(head)]
    return np.concatenate([*start, tokens.template(head, first=True, goes_on=True)])


def text_ids(renderer: Renderer, tokens: Tokens, text: str) -> TokenIds:
    """Compose a text as a document of its own stands in a prompt, and what follows it there, ``[tokens]`` int64."""
    return np.concatenate([tokens.document(text.strip()), tokens.template(renderer.separator, goes_on=True)])


def other_context_ids(head: TokenIds, renderer: Renderer, tokens: Tokens, contexts: Sequence[str]) -> TokenIds:
    """Compose the other context of the sensitivity measurement, ``[tokens]`` int64, at least one.

    It differs from the canonical context as much as it can: the head alone where documents are encoded behind texts,
    the head and a text where they are not. From one text to another, little changes that tells the tokens apart.
    """
    if contexts and len(head):
        return head
    return np.concatenate([head, text_ids(renderer, tokens, _probe(contexts))])


def _probe(contexts: Sequence[str]) -> str:
    """After the same text as before, nothing would change."""
    return PROBE_TEXT if PROBE_TEXT not in contexts else CONTEXT_TEXTS[0]
