"""Tools: offered to the chat template, and read from the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.llms.kvboost.messages import parsed_arguments

from kvboost_rag import KVBoostEngine

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

__all__ = ["conversation", "first_call_only", "offered", "selections", "takes_tools", "tool_names"]


def takes_tools(engine: KVBoostEngine) -> bool:
    """Whether the model's chat template writes tools into the prompt."""
    if not engine.tokenizer.chat_template:
        return False
    messages = [{"role": "user", "content": "x"}]
    probe = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
    without = engine.tokenize(messages)
    try:
        offered = engine.tokenize(messages, template_options={"tools": [probe]})
    except ValueError:
        # The template refuses them.
        return False
    return not np.array_equal(without, offered)


def conversation(user_msg: str | ChatMessage | None, history: Sequence[ChatMessage] | None) -> list[ChatMessage]:
    """Put a user's message behind a history."""
    if isinstance(user_msg, str):
        user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
    return [*(history or []), *([user_msg] if user_msg else [])]


def offered(tools: Sequence[BaseTool]) -> list[dict[str, Any]]:
    """Describe tools in OpenAI's form, which chat templates take."""
    return [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]


def tool_names(template_options: Mapping[str, Any]) -> Collection[str]:
    """Names of the tools in a chat template's options."""
    return [tool["function"]["name"] for tool in template_options.get("tools") or ()]


def selections(response: ChatResponse, *, required: bool) -> list[ToolSelection]:
    """Take the tool calls out of a response.

    Raises
    ------
    ValueError
        If there are none and ``required``.
    """
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    if required and not calls:
        raise ValueError(
            f"the model called no tool but answered {response.message.content!r}; ask again, ask more clearly, or take "
            "a larger model"
        )
    return [
        ToolSelection(tool_id=c.tool_call_id or "", tool_name=c.tool_name, tool_kwargs=parsed_arguments(c.tool_kwargs))
        for c in calls
    ]


def first_call_only(response: ChatResponse) -> ChatResponse:
    """Drop every tool call but the first."""
    blocks = response.message.blocks
    later = [block for block in blocks if isinstance(block, ToolCallBlock)][1:]
    message = response.message.model_copy(update={"blocks": [b for b in blocks if all(b is not c for c in later)]})
    return response.model_copy(update={"message": message})
