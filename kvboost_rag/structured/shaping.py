"""Tools and ``response_format`` of a request: what they add to the prompt, and the grammar that the answer follows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.structured.grammar import Grammar, json_grammar
from kvboost_rag.structured.templates import Abilities, Messages, extend_system
from kvboost_rag.structured.tools import ToolRequest

__all__ = ["Shaped", "shaped"]


@dataclass(frozen=True, eq=False)
class Shaped:
    """A prompt that offers tools or asks for JSON.

    Parameters
    ----------
    prompt
        Messages of the engine.
    template_options
        Further arguments of the chat template.
    grammar
        What the answer is kept to, in Lark; None leaves it free.
    """

    prompt: Messages
    template_options: dict[str, Any]
    grammar: str | None

    def processors(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Sequence[LogitsProcessor]:
        """Make what keeps one answer to the grammar; empty without one."""
        if self.grammar is None:
            return ()
        return (Grammar(self.grammar, tokenizer, model.config.vocab_size),)


def shaped(
    prompt: Messages,
    tools: ToolRequest,
    response_format: Mapping[str, Any] | None,
    abilities: Abilities,
    template_options: Mapping[str, Any],
) -> Shaped:
    """Offer tools, or force a call of one; without a forced call, keep the answer to ``response_format``.

    Parameters
    ----------
    prompt
        Messages of the engine.
    tools
        Of the request.
    response_format
        In OpenAI's form: ``json_object`` or ``json_schema``, which shows the schema to the model.
    abilities
        Of the chat template.
    template_options
        Of the caller.

    Raises
    ------
    ValueError
        If the format is not known.
    """
    options = dict(template_options)
    if tools.tools and abilities.lists_tools:
        options["tools"] = list(tools.tools)
    elif tools.tools:
        prompt = extend_system(prompt, tools.description)
    if tools.forced:
        begun = [*prompt, {"role": "assistant", "content": tools.begun}]
        return Shaped(begun, {**options, "continue_final_message": True}, tools.grammar)
    if response_format is None:
        return Shaped(prompt, options, None)
    prompt, grammar = _formatted(prompt, response_format)
    return Shaped(prompt, options, grammar)


def _formatted(prompt: Messages, form: Mapping[str, Any]) -> tuple[Messages, str]:
    kind = form.get("type")
    if kind == "json_object":
        return prompt, json_grammar(form.get("schema", {"type": "object"}))
    if kind != "json_schema":
        raise ValueError(f"response_format of type {kind!r} is not known; pass 'json_schema' or 'json_object'")
    schema = form["json_schema"]["schema"]
    shown = f"Answer with JSON that follows this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    return extend_system(prompt, shown), json_grammar(schema)
