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
from kvboost_rag.server.documents import chosen_documents, keep_documents, new_documents
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits
from kvboost_rag.server.messages import engine_messages
from kvboost_rag.server.schemas import AskedFields, ChatRequest, CompletionRequest
from kvboost_rag.server.service import Tenant
from kvboost_rag.server.writes import Since
from kvboost_rag.structured import Abilities, Piece, Reader, ToolRequest, shaped
from kvboost_rag.types import Document

__all__ = ["Item", "answer_chat", "answer_completion"]

Item = list[Piece] | Result
"""What is new after one token (often nothing that can be shown yet), and at the end the result."""

# What transformers gives the template itself has other names than the arguments that it comes from.
_TEMPLATE_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "conversations", "messages"
}
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
    keeps_documents: bool


def answer_chat(caller: Tenant, body: ChatRequest, limits: Limits, since: Since) -> Generator[Item | None, None, None]:
    """Answer a chat; None comes after each document that is kept, before everything else."""
    engine = caller.engine
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
    return _answer(caller, _Asked(form.prompt, options, tools.reader(), body.register_documents), limits, since)


def answer_completion(
    caller: Tenant, body: CompletionRequest, limits: Limits, since: Since
) -> Generator[Item | None, None, None]:
    """Continue a text; with documents it is a question, laid out as the engine's layout says."""
    options = _options(caller.engine, body, limits)
    return _answer(caller, _Asked(body.text, options, Reader(), body.register_documents), limits, since)


def _answer(caller: Tenant, asked: _Asked, limits: Limits, since: Since) -> Generator[Item | None, None, None]:
    # A request that is refused leaves no documents behind: whatever can be wrong with it is looked for first.
    stream = caller.engine.stream(asked.prompt, **asked.options)
    new = _documents_to_keep(caller.engine, asked, limits)
    _check_length(caller.engine, asked, limits, always=bool(new))
    yield from keep_documents(caller, new, since)
    with closing(stream):
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
        options["documents"] = chosen_documents(engine, body.documents, limits)
    return options


def _documents_to_keep(engine: KVBoostEngine, asked: _Asked, limits: Limits) -> list[Document]:
    if not asked.keeps_documents or engine.trusted_only:
        return []
    return new_documents(engine, asked.options.get("documents", ()), limits)


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


def _check_length(engine: KVBoostEngine, asked: _Asked, limits: Limits, *, always: bool) -> None:
    if limits.max_prompt_tokens is None and not always:
        return
    names = ("documents", "template_options", "max_tokens")
    tokens = len(engine.tokenize(asked.prompt, **{n: asked.options[n] for n in names if n in asked.options}))
    if limits.max_prompt_tokens is not None and tokens > limits.max_prompt_tokens:
        raise ApiError(
            400, f"the prompt has {tokens} tokens, and the server takes {limits.max_prompt_tokens}; pass fewer or "
            "shorter documents", "prompt_too_long",
        )  # fmt: skip


