"""Tokenizers that put a space before every text: fine before a prompt, wrong before each of its pieces."""

from __future__ import annotations

import copy
import json
import logging
import re
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

__all__ = ["added_tokens", "has_dummy_prefix", "without_dummy_prefix"]

logger = logging.getLogger("kvboost_rag")

_SPACES = ("\u2581", "\u0120")
"""How a space is written inside tokens: by SentencePiece, by byte-level BPE."""


def has_dummy_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text without a space gets one in front, as SentencePiece's ``add_dummy_prefix`` does."""
    ids = tokenizer("\n", add_special_tokens=False).input_ids
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith(_SPACES)


def without_dummy_prefix(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Copy a tokenizer that reads text as if it stood in the middle of a longer one.

    Parameters
    ----------
    tokenizer
        Left as it is.

    Returns
    -------
    PreTrainedTokenizerBase
        A copy; the tokenizer itself where it puts no space before a text. Where that can not be helped (tokenizers
        written in Python) it does so in the copy too, and the log says it.
    """
    if not has_dummy_prefix(tokenizer):
        return tokenizer
    inner = copy.deepcopy(tokenizer)
    if inner.is_fast:
        backend: Tokenizer = inner.backend_tokenizer
        spec = json.loads(backend.to_str())
        spec |= {"normalizer": _plain(spec["normalizer"]), "pre_tokenizer": _plain(spec["pre_tokenizer"])}
        rebuilt = Tokenizer.from_str(json.dumps(spec))
        backend.normalizer, backend.pre_tokenizer = rebuilt.normalizer, rebuilt.pre_tokenizer
    if has_dummy_prefix(inner):
        logger.warning(
            "%s puts a space before every document and behind it, which it would not do in one long text; "
            "a fast tokenizer of the same model can be told not to",
            type(tokenizer).__name__,
        )
    return inner


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Find the tokens behind which a text begins anew for the tokenizer; None if there are none."""
    names = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _plain(part: Any) -> Any:
    """Take the prefix out of a normaliser or pre-tokeniser, as `tokenizers` writes them down."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return part | {"add_prefix_space": False}
    if part["type"] == "Sequence":
        (kind,) = part.keys() & {"normalizers", "pretokenizers"}
        return part | {kind: [inner for each in part[kind] if (inner := _plain(each)) is not None]}
    return part
