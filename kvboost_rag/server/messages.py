"""OpenAI's messages to the engine's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.schemas import ChatMessage, ToolCall
from kvboost_rag.structured import Abilities, MadeCall, Messages, with_calls, with_result

__all__ = ["engine_messages"]


def engine_messages(messages: Sequence[ChatMessage], abilities: Abilities) -> Messages:
    """Turn messages into mappings with role and content.

    Raises
    ------
    ApiError
        400 if the arguments of a call are no JSON.
    """
    return [_translated(message, i, abilities) for i, message in enumerate(messages)]


def _translated(message: ChatMessage, i: int, abilities: Abilities) -> dict[str, Any]:
    text = _text(message)
    # Chat templates know the older name.
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": text}
    if message.name:
        out["name"] = message.name
    if message.tool_calls:
        if role != "assistant":
            raise ApiError(400, "tool_calls belong to a message of the assistant", "invalid_value", f"messages[{i}]")
        return out | with_calls(text, [_made(call, i) for call in message.tool_calls], abilities)
    if role == "tool":
        return out | with_result([text] if text else [], message.tool_call_id, abilities)
    return out


def _text(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text for part in message.content)


def _made(call: ToolCall, i: int) -> MadeCall:
    try:
        # Some clients write nothing for a call without arguments.
        arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("they are no object")
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"the arguments of call {call.id!r} are no JSON: {error}", "invalid_value", f"messages[{i}].tool_calls"
        ) from error
    return MadeCall(call.id, call.function.name, arguments)
