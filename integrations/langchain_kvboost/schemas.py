"""Structured output: a schema bound to the chat model, and answers that are whole or an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["structured_chain"]


def structured_chain(
    chat: BaseChatModel, schema: dict[str, Any] | type, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Bind a schema to a chat model and parse its answers.

    Parameters
    ----------
    chat
        Takes ``response_format`` and tools.
    schema
        In any form that LangChain knows.
    method
        ``"function_calling"``, ``"json_schema"`` or ``"json_mode"``.
    include_raw
        Whether to return the message and a parsing error too, as a mapping.

    Notes
    -----
    LangChain's parsers repair JSON that was cut. An answer that is not whole raises OutputParserException instead.
    """
    form = {"kwargs": {"method": method}, "schema": schema}
    if method == "function_calling":
        bound = chat.bind_tools([schema], tool_choice="any", ls_structured_output_format=form)
    else:
        response_format = _response_format(convert_to_json_schema(schema), method)
        bound = chat.bind(response_format=response_format, ls_structured_output_format=form)
    parser = RunnableGenerator(_whole, _awhole) | _parser(schema, method)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Hand a message on, or its chunks as they come; raise at the end if they are no whole answer."""
    parts = []
    for message in messages:
        parts.append(message)
        yield message
    _check_whole(parts)


async def _awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    parts = []
    async for message in messages:
        parts.append(message)
        yield message
    _check_whole(parts)


def _check_whole(parts: Sequence[AIMessage]) -> None:
    message: Any = sum(parts[1:], parts[0])
    if message.tool_calls:
        return
    try:
        json.loads(message.text)
    except ValueError as error:
        cut = message.response_metadata.get("finish_reason") == "length"
        reason = "it was cut at max_tokens; pass a larger one" if cut else "a stop string may have cut it; leave it out"
        raise OutputParserException(f"the answer is not whole: {reason}", llm_output=message.text) from error


def _response_format(schema: dict[str, Any], method: str) -> dict[str, Any]:
    if method == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": schema.get("title", "answer"), "schema": schema}}
    if method == "json_mode":
        return {"type": "json_object", "schema": schema}
    raise ValueError(f"method={method!r} is not known; pass 'function_calling', 'json_schema' or 'json_mode'")


def _parser(schema: dict[str, Any] | type, method: str) -> BaseOutputParser[Any]:
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    # Checked in the line above, which mypy can not follow.
    model: Any = schema
    if method != "function_calling":
        return PydanticOutputParser(pydantic_object=model) if is_model else JsonOutputParser()
    if is_model:
        return PydanticToolsParser(tools=[model], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
