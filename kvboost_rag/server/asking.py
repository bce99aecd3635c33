"""A request to what the engine is asked, and the engine's answer piece by piece; all of it runs in a worker thread."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.report import Result
from kvboost_rag.server.documents import chosen_documents
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits
from kvboost_rag.server.messages import engine_messages
from kvboost_rag.server.schemas import AskedFields, ChatRequest, CompletionRequest
from kvboost_rag.structured import Abilities, Piece, Reader, ToolRequest, shaped

__all__ = ["Item", "answer_chat", "answer_completion"]

Item = list[Piece] | Result
"""What is new after one token (often nothing that can be shown yet), and at the end the result."""

_TEMPLATE_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos", "repair", "quality",
    "reuse",
)  # fmt: skip
_USUAL_TOKENS = 256


@dataclass(frozen=True, eq=False)
class _Asked:
    prompt: Any
    options: dict[str, Any]
    reader: Reader


def answer_chat(engine: KVBoostEngine, body: ChatRequest, limits: Limits) -> Generator[Item, None, None]:
    """Answer a chat."""
    options = _options(engine, body, limits)
    listed = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice if body.tool_choice is None or isinstance(body.tool_choice, str) else (
        body.tool_choice.model_dump()
    )
    tools = ToolRequest.of(listed, choice)
    abilities = Abilities.of_tokenizer(engine.tokenizer, tools.tools)
    form = shaped(
        engine_messages(body.messages, abilities), tools, _format(body), abilities, _template_options(body)
    )
    if processors := form.processors(engine.tokenizer, engine.model):
        options["logits_processor"] = processors
    options["template_options"] = form.template_options
    return _answer(engine, _Asked(form.prompt, options, tools.reader()), limits)


def answer_completion(engine: KVBoostEngine, body: CompletionRequest, limits: Limits) -> Generator[Item, None, None]:
    """Continue a text; with documents it is a question, laid out as the engine's layout says."""
    return _answer(engine, _Asked(body.text, _options(engine, body, limits), Reader()), limits)


def _answer(engine: KVBoostEngine, asked: _Asked, limits: Limits) -> Generator[Item, None, None]:
    _check_length(engine, asked, limits)
    with closing(engine.stream(asked.prompt, **asked.options)) as stream:
        while True:
            try:
                delta = next(stream)
            except StopIteration as end:
                yield asked.reader.end()
                yield end.value
                return
            yield asked.reader.push(delta.text)


def _options(engine: KVBoostEngine, body: AskedFields, limits: Limits) -> dict[str, Any]:
    options: dict[str, Any] = {name: getattr(body, name) for name in _PASSED_ON}
    options["max_tokens"] = _max_tokens(body.answer_tokens, limits.max_tokens)
    options["timeout"] = limits.timeout
    if body.documents is not None:
        options["documents"] = chosen_documents(engine, body.documents, limits, register=body.register_documents)
    return options


def _max_tokens(asked: int | None, limit: int) -> int:
    if asked is None:
        return min(_USUAL_TOKENS, limit)
    if not 1 <= asked <= limit:
        raise ApiError(400, f"max_tokens is {asked}; pass 1 to {limit}", "max_tokens_out_of_range", "max_tokens")
    return asked


def _format(body: ChatRequest) -> dict[str, Any] | None:
    if body.response_format is None or not body.is_formatted:
        return None
    return body.response_format.model_dump(by_alias=True, exclude_none=True)


def _template_options(body: ChatRequest) -> dict[str, Any]:
    # Among them the template itself, which is a program.
    taken = sorted(_TEMPLATE_ARGUMENTS & set(body.chat_template_kwargs))
    if taken:
        raise ApiError(
            400, f"chat_template_kwargs can not set {', '.join(taken)}; it holds what the template itself asks for",
            "invalid_value", "chat_template_kwargs",
        )  # fmt: skip
    return body.chat_template_kwargs


def _check_length(engine: KVBoostEngine, asked: _Asked, limits: Limits) -> None:
    if limits.max_prompt_tokens is None:
        return
    named = {name: asked.options[name] for name in ("documents", "template_options") if name in asked.options}
    tokens = len(engine.tokenize(asked.prompt, **named))
    if tokens > limits.max_prompt_tokens:
        raise ApiError(
            400, f"the prompt has {tokens} tokens, and the server takes {limits.max_prompt_tokens}; pass fewer or "
            "shorter documents", "prompt_too_long",
        )  # fmt: skip


