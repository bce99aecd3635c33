"""LangChain's messages to the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvboost_rag.structured import Abilities, MadeCall, Messages, with_calls, with_result
from langchain_kvboost.documents import cut_at, to_engine

__all__ = ["Prompt", "artifact_documents", "translate"]

Prompt = Messages

_ROLES: dict[type[BaseMessage], str] = {
    AIMessage: "assistant",
    HumanMessage: "user",
    SystemMessage: "system",
    FunctionMessage: "tool",
    ToolMessage: "tool",
}
# What a model said to itself or called; the calls are in ``tool_calls``.
_UNSAID = frozenset({"tool_use", "tool_call", "input_json_delta", "thinking", "redacted_thinking", "reasoning"})


def translate(messages: Sequence[BaseMessage], abilities: Abilities) -> Prompt:
    """Turn messages into mappings with role and content.

    What the template would leave out is written as text, in the form that most templates give it.

    Parameters
    ----------
    messages
        Of LangChain; documents in the artifact of a tool's message are found in its content, one behind the other.
    abilities
        Of the template.

    Raises
    ------
    ValueError
        If a message holds something else than text.
    """
    return [_translated(message, abilities) for message in messages]


def artifact_documents(messages: Sequence[BaseMessage]) -> list[Document]:
    """Collect the documents that tools handed over beside their text."""
    return [document for message in messages for document in _artifact(message)]


def _translated(message: BaseMessage, abilities: Abilities) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else _role(message)
    text = _text(message)
    out: dict[str, Any] = {"role": role, "content": text}
    if message.name:
        out["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [MadeCall(call["id"], call["name"], call["args"]) for call in message.tool_calls]
        return {**out, **with_calls(text, calls, abilities)}
    if role == "tool":
        return {**out, **_result(text, message, abilities)}
    return out


def _role(message: BaseMessage) -> str:
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"a {type(message).__name__} can not be put into a prompt; leave it out or use another message")


def _result(text: str, message: BaseMessage, abilities: Abilities) -> dict[str, Any]:
    parts = cut_at(text, [to_engine(document) for document in _artifact(message)])
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    return with_result(parts, call_id, abilities)


def _artifact(message: BaseMessage) -> list[Document]:
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    if isinstance(artifact, Document):
        return [artifact]
    return [part for part in artifact if isinstance(part, Document)] if isinstance(artifact, (list, tuple)) else []


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block, message.type) for block in message.content)


def _block_text(block: str | dict[str, Any], kind: str) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") in _UNSAID:
        return ""
    if not isinstance(block.get("text"), str):
        raise ValueError(
            f"a {kind} message holds a block of type {block.get('type')!r}, but the model reads text alone; remove it"
        )
    return str(block["text"])
