"""LangChain's messages to the engine's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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

from kvboost_rag import Document as EngineDocument
from langchain_kvboost.documents import cut_at, to_engine

__all__ = ["Abilities", "Prompt", "artifact_documents", "extend_system", "translate", "written_call"]

Prompt = list[dict[str, Any]]

_ROLES: dict[type[BaseMessage], str] = {
    AIMessage: "assistant",
    HumanMessage: "user",
    SystemMessage: "system",
    FunctionMessage: "tool",
    ToolMessage: "tool",
}
# What a model said to itself or called; the calls are in ``tool_calls``.
_UNSAID = frozenset({"tool_use", "tool_call", "input_json_delta", "thinking", "redacted_thinking", "reasoning"})


@dataclass(frozen=True)
class Abilities:
    """What a chat template makes of tools by itself.

    Parameters
    ----------
    lists_tools
        It writes the tools that can be called.
    writes_calls
        It writes the calls of an assistant's message.
    reads_results
        It knows the role ``tool``.
    """

    lists_tools: bool
    writes_calls: bool
    reads_results: bool

    @classmethod
    def of(cls, template: str) -> Abilities:
        """Read them off a template."""
        return cls(
            lists_tools=bool(re.search(r"\btools\b", template)),
            writes_calls="tool_calls" in template,
            reads_results=bool(re.search(r"""["']tool["']""", template)),
        )


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


def extend_system(prompt: Prompt, text: str) -> Prompt:
    """Add text to the system message, or a system message to the prompt."""
    if prompt and prompt[0]["role"] == "system":
        parts = prompt[0]["content"]
        return [{**prompt[0], "content": [*_as_parts(parts), f"\n\n{text}"]}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def written_call(name: str, arguments: Any) -> str:
    """Write a call as models are taught to."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _translated(message: BaseMessage, abilities: Abilities) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else _role(message)
    text = _text(message)
    out: dict[str, Any] = {"role": role, "content": text}
    if message.name:
        out["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        return {**out, **_with_calls(text, message, abilities)}
    if role == "tool":
        return {**out, **_result(text, message, abilities)}
    return out


def _role(message: BaseMessage) -> str:
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"a {type(message).__name__} can not be put into a prompt; leave it out or use another message")


def _with_calls(text: str, message: AIMessage, abilities: Abilities) -> dict[str, Any]:
    if not abilities.writes_calls:
        calls = [written_call(call["name"], call["args"]) for call in message.tool_calls]
        return {"content": "\n".join([text, *calls] if text else calls)}
    calls_ = [
        {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
        for call in message.tool_calls
    ]
    return {"tool_calls": calls_}


def _result(text: str, message: BaseMessage, abilities: Abilities) -> dict[str, Any]:
    parts = cut_at(text, [to_engine(document) for document in _artifact(message)])
    if not abilities.reads_results:
        return {"role": "user", "content": ["<tool_response>\n", *parts, "\n</tool_response>"]}
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    return {"content": parts or text, "tool_call_id": call_id}


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


def _as_parts(content: Any) -> list[str | EngineDocument]:
    return [content] if isinstance(content, str) else list(content)
