"""An answer growing, as LlamaIndex responses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.llms.kvboost.errors import RequestError
from llama_index.llms.kvboost.escaped import warn_of_escaped_documents
from llama_index.llms.kvboost.tool_calls import find_tool_calls

from kvboost_rag import KVBoostEngine, Result, SpanKind

__all__ = ["Part", "chat_response", "completion_response", "parts", "raw"]


@dataclass(frozen=True)
class Part:
    """An answer up to now.

    Parameters
    ----------
    text
        All of it.
    delta
        What is new.
    result
        The whole answer; only in the last part, whose ``delta`` is empty.
    """

    text: str
    delta: str
    result: Result | None = None


def parts(
    engine: KVBoostEngine, prompt: Callable[[], Any], options: Mapping[str, Any]
) -> Generator[Part, None, None]:
    """Answer a prompt; closing the generator stops the compute.

    Parameters
    ----------
    engine
        Answers.
    prompt
        Makes what :meth:`kvboost_rag.KVBoostEngine.stream` takes.
    options
        Of the same method.

    Raises
    ------
    RequestError
        From the first ``next``, if the prompt can not be made or the engine refuses it.
    """
    text = ""
    with closing(_stream(engine, prompt, options)) as stream:
        while True:
            try:
                delta = next(stream).text
            except StopIteration as end:
                yield Part(end.value.text, "", end.value)
                return
            except ValueError as error:
                raise RequestError(str(error)) from error
            if delta:
                text += delta
                yield Part(text, delta)


def _stream(
    engine: KVBoostEngine, prompt: Callable[[], Any], options: Mapping[str, Any]
) -> Generator[Any, None, Result]:
    asked = prompt()
    for text in [asked] if isinstance(asked, str) else [message["content"] for message in asked]:
        warn_of_escaped_documents(engine, text)
    return (yield from engine.stream(asked, **options))


def raw(result: Result) -> dict[str, Any]:
    """Describe an answer: the usage that LlamaIndex's token counter reads, the finish reason and the reuse report."""
    cached = result.report.tokens(SpanKind.EXACT) + result.report.tokens(SpanKind.APPROXIMATE)
    usage = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"usage": usage, "finish_reason": result.finish_reason, "report": result.report}


def completion_response(part: Part) -> CompletionResponse:
    """Make the response of a completion."""
    return CompletionResponse(text=part.text, delta=part.delta, raw=part.result and raw(part.result))


def chat_response(part: Part, tools: Collection[str]) -> ChatResponse:
    """Make the response of a chat; calls of the offered tools are cut from the text of the last part."""
    text, calls = find_tool_calls(part.text, tools) if part.result and tools else (part.text, [])
    blocks = [ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in calls]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[TextBlock(text=text), *blocks])
    return ChatResponse(message=message, delta=part.delta, raw=part.result and raw(part.result))
