"""LlamaIndex chat messages to the messages of a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

__all__ = ["parsed_arguments", "to_template_messages"]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
    MessageRole.TOOL: "tool",
}
# What a template may want to know of a tool's answer; other additional_kwargs belong to other providers.
_TOOL_KEYS = ("tool_call_id", "name")


def to_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Translate messages to what chat templates take: ``role``, ``content``, and tool calls in OpenAI's form.

    Parameters
    ----------
    messages
        Of text, tool calls and thinking; cache points have no effect, since every known document is reused anyway.

    Returns
    -------
    list[dict[str, Any]]
        One for each message, ``content`` always a str.

    Raises
    ------
    ValueError
        If a message holds images, audio or anything else that a text model can not read.
    """
    return [_translated(message) for message in messages]


def _translated(message: ChatMessage) -> dict[str, Any]:
    translated: dict[str, Any] = {"role": _ROLES[message.role], "content": message.content or ""}
    calls = [_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    thoughts = [block.content for block in message.blocks if isinstance(block, ThinkingBlock) and block.content]
    if calls:
        translated["tool_calls"] = calls
    if thoughts:
        translated["reasoning_content"] = "\n".join(thoughts)
    if translated["role"] == "tool":
        translated |= {key: message.additional_kwargs[key] for key in _TOOL_KEYS if key in message.additional_kwargs}
    for block in message.blocks:
        if not isinstance(block, (TextBlock, ToolCallBlock, ThinkingBlock, CachePoint)):
            raise ValueError(f"a {type(block).__name__} is in the messages, but the model reads text only; remove it")
    return translated


def _call(block: ToolCallBlock) -> dict[str, Any]:
    function = {"name": block.tool_name, "arguments": parsed_arguments(block.tool_kwargs)}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def parsed_arguments(arguments: dict[str, Any] | str) -> Any:
    """Give templates a mapping, which they write as JSON; text that is no JSON stays as it is."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
