"""Keeps an answer to a grammar, with llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import FloatTensor, LongTensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

__all__ = ["Grammar", "call_grammar", "json_grammar"]

# One way to write JSON, that of json.dumps: fewer tokens, and the same text as in the prompt's examples.
_ONE_WAY = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, Any] = WeakKeyDictionary()
_lock = threading.Lock()


class Grammar(LogitsProcessor):
    """Leaves only the tokens that a grammar allows; for one answer.

    Parameters
    ----------
    grammar
        In Lark, from `json_grammar` or `call_grammar`.
    tokenizer
        The model's; a fast one.
    vocab_size
        Length of the logits.

    Raises
    ------
    ImportError
        If llguidance is not installed.
    ValueError
        If the schema in the grammar asks for what llguidance can not do, or the tokenizer is not a fast one.

    Notes
    -----
    llguidance: https://github.com/guidance-ai/llguidance.
    """

    def __init__(self, grammar: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        from_lark, matcher = _llguidance().LLMatcher.grammar_from_lark, _llguidance().LLMatcher
        self._matcher = matcher(_tokenizer(tokenizer, vocab_size), from_lark(grammar), log_level=0)
        self._seen: int | None = None
        self._check("the schema can not be followed")

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """Take the tokens ``[1, tokens]`` chosen so far; ban the others in the scores ``[1, vocab]``."""
        length = int(input_ids.shape[1])
        for token in input_ids[0, length if self._seen is None else self._seen :].tolist():
            self._matcher.consume_token(token)
        self._seen = length
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check("the answer left its grammar")
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]].astype(bool)
        banned = ~torch.from_numpy(allowed).to(scores.device)
        return cast(FloatTensor, scores.masked_fill(banned, -torch.inf))

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise ValueError(f"{what}: {reason}; simplify the schema")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Write the grammar of JSON that follows a schema."""
    return f"start: value\nvalue: {_json(schema)}"


def call_grammar(tools: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Write the grammar of what stands behind ``{"name":`` or, for one tool alone, behind ``"arguments":``.

    Parameters
    ----------
    tools
        The schema of the arguments of each tool, by name.
    """
    if len(tools) == 1:
        return f'start: " " value\nvalue: {_json(*tools.values())}'
    calls = [f"call_{i}" for i in range(len(tools))]
    rules = [
        f"{call}: {_literal(f' {json.dumps(name)}, {_ARGUMENTS} ')} value_{call}\nvalue_{call}: {_json(schema)}"
        for call, (name, schema) in zip(calls, tools.items(), strict=True)
    ]
    return "\n".join([f"start: {' | '.join(calls)}", *rules])


_ARGUMENTS = '"arguments":'


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_WAY})}"


def _literal(text: str) -> str:
    return json.dumps(text)


def _tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Any:
    if not tokenizer.is_fast:
        raise ValueError("constrained decoding needs a fast tokenizer; load one, or ask without tool_choice and schema")
    # Takes a second or two, so each tokenizer is read once.
    with _lock:
        if tokenizer not in _tokenizers:
            from llguidance.hf import from_tokenizer

            fast: Any = tokenizer
            _tokenizers[tokenizer] = from_tokenizer(fast, n_vocab=vocab_size)
        return _tokenizers[tokenizer]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("tool_choice and structured output need llguidance: pip install llguidance") from error
    return llguidance
