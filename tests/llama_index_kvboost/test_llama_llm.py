"""The LLM's methods agree with each other and with the engine."""

from __future__ import annotations

import asyncio
import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.kvboost import KVBoostLLM
from pydantic_core import to_json
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import KVBoostEngine, Report

pytestmark = pytest.mark.real
QUESTION = "What is the capital of France?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
# Chats and unformatted completions of one question are the same prompt.
WAYS = {
    "chat": lambda llm, **o: llm.chat(MESSAGES, **o),
    "stream_chat": lambda llm, **o: list(llm.stream_chat(MESSAGES, **o)),
    "achat": lambda llm, **o: asyncio.run(llm.achat(MESSAGES, **o)),
    "astream_chat": lambda llm, **o: asyncio.run(gathered(llm.astream_chat(MESSAGES, **o))),
    "complete": lambda llm, **o: llm.complete(QUESTION, **o),
    "stream_complete": lambda llm, **o: list(llm.stream_complete(QUESTION, **o)),
    "acomplete": lambda llm, **o: asyncio.run(llm.acomplete(QUESTION, **o)),
    "astream_complete": lambda llm, **o: asyncio.run(gathered(llm.astream_complete(QUESTION, **o))),
}
STREAMS = [way for way in WAYS if "stream" in way]


async def gathered(call):
    return [response async for response in await call]


def text_of(response):
    return response.message.content if hasattr(response, "message") else response.text


@pytest.fixture(scope="module")
def expected(engine):
    messages = [{"role": "user", "content": QUESTION}]
    return engine.generate(messages, max_tokens=6, temperature=0)


@pytest.mark.parametrize("way", WAYS)
def test_each_method_gives_the_engines_answer_and_its_usage(way, llm, expected):
    out = WAYS[way](llm)
    last = out[-1] if isinstance(out, list) else out
    assert text_of(last) == expected.text != ""
    usage = last.raw["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.prompt_tokens, 6)
    assert last.raw["finish_reason"] == "length"
    assert isinstance(last.raw["report"], Report)


@pytest.mark.parametrize("way", STREAMS)
def test_streams_give_cumulative_text_and_deltas(way, llm, expected):
    responses = WAYS[way](llm)
    text = ""
    for response in responses:
        text += response.delta
        assert text_of(response) == text
    assert text == expected.text
    assert len(responses) > 3
    assert all(response.raw is None for response in responses[:-1])


def test_raw_holds_plain_data_only(llm):
    response = llm.chat(MESSAGES)
    assert json.loads(to_json(response.raw))["report"]["spans"]
    assert json.loads(response.model_dump_json())["raw"]["usage"]["total_tokens"] > 6


def test_predict_and_callbacks_see_the_models_own_token_counts(llm, expected):
    counter = TokenCountingHandler(tokenizer=str.split)
    llm.callback_manager = CallbackManager([counter])
    assert llm.predict(PromptTemplate("{q}"), q=QUESTION) == expected.text
    assert "".join(llm.stream(PromptTemplate("{q}"), q=QUESTION)) == expected.text
    counts = [(event.prompt_token_count, event.completion_token_count) for event in counter.llm_token_counts]
    assert counts == [(expected.prompt_tokens, 6)] * 2


def test_an_answer_may_take_so_long_and_no_longer(llm):
    with pytest.raises(TimeoutError):
        llm.chat(MESSAGES, max_tokens=4000, timeout=0.01)


def test_closing_a_stream_stops_the_compute(llm, engine):
    stream = llm.stream_chat(MESSAGES, max_tokens=4000)
    next(stream)
    stream.close()
    assert llm.chat(MESSAGES).raw["finish_reason"] == "length"


def test_cancelling_an_async_call_stops_the_compute(llm, monkeypatch):
    steps = []
    step = KVBoostEngine._step
    monkeypatch.setattr(KVBoostEngine, "_step", lambda *a: steps.append(1) or step(*a))

    async def main():
        call = asyncio.create_task(llm.achat(MESSAGES, max_tokens=4000))
        while not steps:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return len(steps)

    stopped = asyncio.run(main())
    assert len(steps) == stopped < 100


def test_metadata_comes_from_model_and_template(llm, tool_engine, plain_engine):
    chat, tools, plain = (KVBoostLLM(engine=e).metadata for e in (llm.engine, tool_engine, plain_engine))
    assert (chat.is_chat_model, chat.is_function_calling_model) == (True, False)
    assert (tools.is_chat_model, tools.is_function_calling_model) == (True, True)
    assert (plain.is_chat_model, plain.is_function_calling_model) == (False, False)
    assert (chat.context_window, llm.metadata.num_output) == (8192, 6)


def test_a_model_is_loaded_once_when_it_is_needed_and_survives_a_dict(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    made = KVBoostLLM(str(tmp_path), max_tokens=1, temperature=0, engine_options={"max_prefix_bytes": 0})
    again = KVBoostLLM.from_dict(made.to_dict())
    assert again.engine_options == {"max_prefix_bytes": 0}
    assert again._engine is None
    again.to_payload()
    assert again._engine is None
    with ThreadPoolExecutor(2) as pool:
        engines = set(pool.map(lambda _: again.engine, range(2)))
    assert len(engines) == 1
    assert again.complete("2 + 2 =").raw["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("arguments", [{}, {"model": "x", "engine": 1}, {"model": "x", "max_token": 3}])
def test_wrong_constructor_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        KVBoostLLM(**arguments)


def test_engine_options_next_to_an_engine_are_refused(engine):
    with pytest.raises(ValueError, match="where the engine is made"):
        KVBoostLLM(engine=engine, engine_options={"namespace": "x"})


def test_a_calls_repair_or_quality_stands_for_both(llm):
    safe = llm.model_copy(update={"quality": "safe"})
    assert safe.options({})["quality"] == "safe"
    assert safe.options({"repair": "none"})["quality"] is None
    assert safe.chat(MESSAGES, repair="none").raw["report"].repair == "none"


def test_template_options_of_a_call_are_added(llm):
    preset = llm.model_copy(update={"template_options": {"a": 1, "b": 2}})
    assert preset.options({"template_options": {"b": 3}})["template_options"] == {"a": 1, "b": 3}


def test_the_prompt_helper_fills_the_window_and_never_overflows(llm, nodes):
    helper = llm.prompt_helper()
    template = PromptTemplate("Context: {context_str}\nSay something.")
    texts = [node.text for node in nodes]
    small = helper.model_copy(update={"context_window": 600})
    chunks = small.repack(template, texts, llm=llm)
    assert len(chunks) > 2
    sizes = []
    for chunk in chunks:
        messages = [{"role": "user", "content": template.format(context_str=chunk)}]
        sizes.append(len(llm.engine.tokenize(messages)) + llm.max_tokens)
    assert max(sizes) <= 600
    assert min(sizes[:-1]) > 480


def test_the_async_methods_are_not_those_of_the_base_class():
    for name in ("achat", "astream_chat", "acomplete", "astream_complete"):
        assert getattr(KVBoostLLM, name) is not getattr(LLM, name)
        assert inspect.iscoroutinefunction(getattr(KVBoostLLM, name))
