"""Tools, calls and their results in a prompt: by the chat template where it knows of them, as text where not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["Abilities", "MadeCall", "Messages", "extend_system", "with_calls", "with_result", "written_call"]

Messages = list[dict[str, Any]]


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

    @classmethod
    def of_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]) -> Abilities:
        """Read them off the template that a tokenizer takes for these tools; without any template there are none."""
        if not tokenizer.chat_template:
            # The engine says what to do about it.
            return cls.of("")
        return cls.of(str(tokenizer.get_chat_template(tools=list(tools) or None)))


@dataclass(frozen=True)
class MadeCall:
    """A call that an earlier answer made.

    Parameters
    ----------
    id, name
        Of the call and of the tool.
    arguments
        Parsed.
    """

    id: str | None
    name: str
    arguments: Any


def with_calls(text: str, calls: Sequence[MadeCall], abilities: Abilities) -> dict[str, Any]:
    """Return what an assistant's message holds besides its role, when it made calls."""
    if not abilities.writes_calls:
        written = [written_call(call.name, call.arguments) for call in calls]
        return {"content": "\n".join([text, *written] if text else written)}
    listed = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"content": text, "tool_calls": listed}


def with_result(parts: Sequence[Any], call_id: str | None, abilities: Abilities) -> dict[str, Any]:
    """Return what takes the place of a tool's message, its role included where the template does not know it.

    Parameters
    ----------
    parts
        Texts and documents of the result.
    call_id
        Which call this is the result of.
    abilities
        Of the template.
    """
    if not abilities.reads_results:
        return {"role": "user", "content": ["<tool_response>\n", *parts, "\n</tool_response>"]}
    return {"content": list(parts) or "", "tool_call_id": call_id}


def extend_system(prompt: Messages, text: str) -> Messages:
    """Add text to the system message, or a system message to the prompt."""
    if prompt and prompt[0]["role"] == "system":
        content = prompt[0]["content"]
        parts = [content] if isinstance(content, str) else list(content)
        return [{**prompt[0], "content": [*parts, f"\n\n{text}"]}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def written_call(name: str, arguments: Any) -> str:
    """Write a call as models are taught to."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
