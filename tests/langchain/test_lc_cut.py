"""Answers cut before their end are errors or invalid calls, never data."""

from __future__ import annotations

import json

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from langchain_kvboost import ChatKVBoost
from langchain_kvboost.answers import chunk_of, message_of
from pydantic import BaseModel
from test_engine import make_engine

from kvboost_rag.structured import FreeReader

METHODS = ("function_calling", "json_schema", "json_mode")


class Poem(BaseModel):
    """A poem."""

    poem: str


@pytest.fixture(scope="module")
def engine():
    with make_engine(repair="none") as made:
        yield made


def cut(engine, **options) -> ChatKVBoost:
    """Ends within the poem: JSON itself takes about as many tokens."""
    return ChatKVBoost(engine=engine, temperature=0, max_tokens=14, **options)


@pytest.mark.parametrize("schema", [Poem, Poem.model_json_schema()], ids=["class", "mapping"])
@pytest.mark.parametrize("method", METHODS)
def test_structured_output_cut_at_max_tokens_is_an_error(engine, method, schema):
    asked = cut(engine).with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="cut at max_tokens; pass a larger one"):
        asked.invoke("Write a poem.")
    with pytest.raises(OutputParserException, match="cut at max_tokens; pass a larger one"):
        list(asked.stream("Write a poem."))


@pytest.mark.parametrize("method", METHODS)
async def test_the_same_in_async_methods_and_beside_the_raw_message(engine, method):
    with pytest.raises(OutputParserException, match="cut at max_tokens"):
        await cut(engine).with_structured_output(Poem, method=method).ainvoke("Write a poem.")
    found = cut(engine).with_structured_output(Poem, method=method, include_raw=True).invoke("Write a poem.")
    assert found["parsed"] is None
    assert "cut at max_tokens" in str(found["parsing_error"])
    assert found["raw"].response_metadata["finish_reason"] == "length"


def test_structured_output_cut_by_a_stop_string_is_an_error(engine):
    asked = cut(engine, stop="poem").with_structured_output(Poem, method="json_schema")
    with pytest.raises(OutputParserException, match="a stop string may have cut it"):
        asked.invoke("Write a poem.")


@tool
def weather(place: str) -> str:
    """Tell the weather at a place."""
    return f"It rains in {place}."


@tool
def music(title: str) -> str:
    """Play a piece of music."""
    return title


@pytest.mark.parametrize("max_tokens", [2, 14, 30])
@pytest.mark.parametrize("tools", [[weather], [weather, music]], ids=["one tool", "two tools"])
def test_a_streamed_call_that_was_cut_is_as_invalid_as_an_invoked_one(engine, tools, max_tokens):
    bound = ChatKVBoost(engine=engine, temperature=0, max_tokens=max_tokens).bind_tools(tools, tool_choice="any")
    answer, (first, *others) = bound.invoke("Hello"), bound.stream("Hello")
    merged = sum(others, first)
    assert answer.response_metadata["finish_reason"] == merged.response_metadata["finish_reason"] == "length"
    assert answer.tool_calls == merged.tool_calls == []
    ((whole,), (streamed,)) = answer.invalid_tool_calls, merged.invalid_tool_calls
    assert streamed["name"] == whole["name"]
    assert json.loads(streamed["args"]) == whole["args"]
    assert whole["error"] == "cut at max_tokens; pass a larger one"


OTHER = '{"name": "launch", "arguments": {}}'


def test_a_tool_that_was_not_offered_is_not_called():
    reader = FreeReader(["weather"])
    assert [piece.text for piece in [*reader.push(OTHER), *reader.end()] if piece.call is None] == [OTHER]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "arguments": {"pl',
        f"<tool_call>{OTHER}</tool_call>",
        '<tool_call>{"place": "x"}</tool_call>',
    ],
)
def test_a_tagged_call_that_is_none_is_an_invalid_one(text):
    pieces = [*(reader := FreeReader(["weather"])).push(text), *reader.end()]
    chunks = [chunk_of(piece) for piece in pieces]
    merged, whole = sum(chunks[1:], chunks[0]), message_of(pieces, "stop", {})
    assert merged.tool_calls == whole.tool_calls == []
    assert len(merged.invalid_tool_calls) == len(whole.invalid_tool_calls) == 1
