"""Structured output that is the answer itself, rather than a call."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["structured_chain"]


def structured_chain(
    chat: BaseChatModel, schema: dict[str, Any] | type, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Bind a schema to a chat model and parse its answers.

    Parameters
    ----------
    chat
        Takes ``response_format``.
    schema
        In any form that LangChain knows.
    method
        ``"json_schema"`` or ``"json_mode"``.
    include_raw
        Whether to return the message and a parsing error too, as a mapping.
    """
    bound = chat.bind(
        response_format=_response_format(convert_to_json_schema(schema), method),
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
    )
    parser = _parser(schema)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: dict[str, Any], method: str) -> dict[str, Any]:
    if method == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": schema.get("title", "answer"), "schema": schema}}
    if method == "json_mode":
        return {"type": "json_object", "schema": schema}
    raise ValueError(f"method={method!r} is not known; pass 'function_calling', 'json_schema' or 'json_mode'")


def _parser(schema: dict[str, Any] | type) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()
