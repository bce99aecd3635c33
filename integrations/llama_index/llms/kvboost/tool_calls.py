"""Tool calls in the text of an answer, in the forms that chat templates teach."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

__all__ = ["ToolCall", "find_tool_calls"]

logger = logging.getLogger("kvboost_rag")

# Hermes, Qwen and SmolLM: one JSON object between tags.
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# Mistral and Llama 3: the answer is nothing but JSON. The mark before it is a special token, which decoding leaves out
# for some tokenizers.
_MARK = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for.

    Parameters
    ----------
    id
        Nine letters and digits, the only form that Mistral's template accepts.
    name
        Of the tool.
    arguments
        By name.
    """

    id: str
    name: str
    arguments: dict[str, Any]


def find_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Split an answer into its text and its tool calls.

    Parameters
    ----------
    text
        The answer.
    names
        Tools that were offered; JSON that names none of them is an answer and no call.

    Returns
    -------
    text : str
        What is no call, without white space around it if there are calls.
    calls : list of ToolCall
        In order; empty if there are none. What looks like a call but can not be read stays in the text and is logged.
    """
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        found = _calls(match[1], names)
        if not found:
            logger.warning("a tool call names no offered tool or is no JSON, and stays in the text: %s", match[1])
        calls.extend(found)
        return "" if found else match[0]

    rest = _TAGGED.sub(taken, text)
    if not calls:
        calls, rest = _calls(_MARK.sub("", text, count=1), names), text
        return ("" if calls else text), calls
    return rest.strip(), calls


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Read one JSON object or a list of them; empty unless all are calls."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return []
    calls = [_call(item, names) for item in (data if isinstance(data, list) else [data])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(item: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(item, Mapping) or item.get("name") not in names:
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    return ToolCall(uuid4().hex[:9], item["name"], arguments) if isinstance(arguments, dict) else None
