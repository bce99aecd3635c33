"""Tool calls in answers, and messages for chat templates."""

from __future__ import annotations

import logging

import pytest
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvboost.messages import to_template_messages
from llama_index.llms.kvboost.tool_calls import find_tool_calls

NAMES = ["add", "weather"]
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def found(text):
    rest, calls = find_tool_calls(text, NAMES)
    return rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{ADD}\n</tool_call>",
        f"[TOOL_CALLS] [{ADD}]",
        f"[{ADD}]",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}',
    ],
)
def test_every_form_is_read(text):
    assert found(text) == ("", [("add", {"a": 1, "b": 2})])


def test_text_around_calls_stays():
    weather = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert found(f"Let me see. <tool_call>{ADD}</tool_call>\n{weather}") == (
        "Let me see.",
        [("add", {"a": 1, "b": 2}), ("weather", {})],
    )


@pytest.mark.parametrize(
    "text",
    ["no", '{"name": "other", "arguments": {}}', '{"name": "add"}', '{"name": "add", "arguments": "x"}', "[1]", "{"],
)
def test_what_is_no_call_stays_as_it_is(text):
    assert found(f" {text}\n") == (f" {text}\n", [])


def test_a_broken_call_stays_and_is_logged(caplog):
    text = '<tool_call>{"name": "add", "argum</tool_call>'
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        assert found(text) == (text, [])
    assert "no JSON" in caplog.text


def test_ids_are_nine_characters_as_mistral_wants_them():
    _, calls = find_tool_calls(f"[{ADD}, {ADD}]", NAMES)
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_messages_reach_the_template_with_role_text_and_calls():
    call = ToolCallBlock(tool_call_id="123456789", tool_name="add", tool_kwargs='{"a": 1}')
    messages = [
        ChatMessage(role="developer", blocks=[TextBlock(text="Be brief."), TextBlock(text="Be kind.")]),
        ChatMessage(role="user", blocks=[TextBlock(text="1?"), CachePoint(cache_control=CacheControl(type="x"))]),
        ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Easy."), call]),
        ChatMessage(role="tool", content="2", additional_kwargs={"tool_call_id": "123456789", "other": 1}),
    ]
    function = {"name": "add", "arguments": {"a": 1}}
    assert to_template_messages(messages) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "123456789", "type": "function", "function": function}],
            "reasoning_content": "Easy.",
        },
        {"role": "tool", "content": "2", "tool_call_id": "123456789"},
    ]


def test_what_a_text_model_can_not_read_is_refused():
    with pytest.raises(ValueError, match="ImageBlock.*remove"):
        to_template_messages([ChatMessage(role="user", blocks=[ImageBlock(url="http://x/y.png")])])
