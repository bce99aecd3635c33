"""What users of other local LLM classes complain about; the numbers are those of the project's list."""

from __future__ import annotations

import asyncio
import copy
import socket

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvboost import KVBoostLLM, RequestError
from tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from kvboost_rag import ContextWindowError, EngineClosedError, KVBoostEngine, SpanKind

pytestmark = pytest.mark.real
QUESTION = "What is the capital of France?"
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"sunny in {city}"


TOOLS = [FunctionTool.from_defaults(weather)]


@pytest.fixture
def tool_llm(tool_engine):
    return KVBoostLLM(engine=tool_engine, max_tokens=40, temperature=0)


def text_of(response):
    return response.message.content if hasattr(response, "message") else response.text


async def drained(call):
    return [response async for response in await call]


def test_complaint_01_tools_reach_the_prompt(tool_llm, llm):
    call = tool_llm._prepare_chat_with_tools(TOOLS, user_msg="What is the weather in Oslo?")
    ids = tool_llm.engine.tokenize(
        [{"role": "user", "content": "x"}], template_options=call["template_options"]
    )
    prompt = tool_llm.engine.tokenizer.decode(ids)
    assert '"name": "weather"' in prompt
    assert "Tell the weather in a city." in prompt
    with pytest.raises(ValueError, match="takes no tools; use a ReActAgent"):
        llm.chat_with_tools(TOOLS, user_msg="What is the weather in Oslo?")


def test_complaint_02_async_methods_are_there(llm):
    async def main():
        short = {"max_tokens": 1}
        streamed = await drained(llm.astream_chat(MESSAGES, **short)), await drained(
            llm.astream_complete(QUESTION, **short)
        )
        whole = await llm.achat(MESSAGES, **short), await llm.acomplete(QUESTION, **short)
        return {text_of(response) for response in (*whole, *(responses[-1] for responses in streamed))}

    assert asyncio.run(main()) == {llm.chat(MESSAGES, max_tokens=1).message.content}


def test_complaint_03_stop_strings_across_tokens_end_every_answer(llm):
    whole = llm.chat(MESSAGES).message.content
    # Neither end of this lies at the border of a token.
    stop = whole[6:13]
    stopped = [
        llm.chat(MESSAGES, stop=stop),
        list(llm.stream_chat(MESSAGES, stop=[stop]))[-1],
        asyncio.run(llm.achat(MESSAGES, stop=stop)),
        llm.complete(QUESTION, stop=stop),
        llm.model_copy(update={"stop": [stop]}).complete(QUESTION),
    ]
    assert {text_of(response) for response in stopped} == {whole[:6]}
    assert {response.raw["finish_reason"] for response in stopped} == {"stop"}
    streamed = "".join(r.delta for r in llm.stream_chat(MESSAGES, stop=stop))
    assert streamed == whole[:6]


def test_complaint_04_the_template_is_applied_and_the_answer_ends(llm, plain_engine):
    expected = llm.engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    response = llm.chat(MESSAGES, max_tokens=60)
    assert response.raw["usage"]["prompt_tokens"] == len(expected)
    assert response.raw["finish_reason"] == "stop"
    plain = KVBoostLLM(engine=plain_engine, max_tokens=3, temperature=0)
    usage = plain.chat(MESSAGES).raw["usage"]
    assert usage["prompt_tokens"] == len(plain.token_ids(f"user: {QUESTION}\nassistant: "))


def test_complaint_05_the_answer_does_not_repeat_the_prompt(llm):
    for response in (llm.chat(MESSAGES), llm.complete(QUESTION), llm.complete(QUESTION, formatted=True)):
        assert QUESTION not in text_of(response)
        assert "<|im_start|>" not in text_of(response)


def test_complaint_06_there_is_one_bos():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    with KVBoostEngine(tiny_model("llama"), tokenizer) as engine:
        llm = KVBoostLLM(engine=engine, max_tokens=1, temperature=0)
        turns = [{"role": "user", "content": QUESTION}]
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # The tokenizer alone would put a second one before text that begins with one.
        once = len(tokenizer(rendered).input_ids) - 1
        assert llm.chat(MESSAGES).raw["usage"]["prompt_tokens"] == once
        assert llm.complete(rendered, formatted=True).raw["usage"]["prompt_tokens"] == once
        assert llm.complete("Hello", formatted=True).raw["usage"]["prompt_tokens"] == 1 + len("Hello")


def test_complaint_07_no_argument_of_a_call_is_dropped(llm):
    assert llm.chat(MESSAGES, max_tokens=2).raw["usage"]["completion_tokens"] == 2
    drawn = [llm.complete(QUESTION, temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    calls = [llm.chat, llm.stream_chat, lambda m, **o: asyncio.run(llm.achat(m, **o))]
    for call in calls:
        with pytest.raises(ValueError, match="unknown arguments max_new_tokens; known are max_tokens"):
            call(MESSAGES, max_new_tokens=2)
    with pytest.raises(ValueError, match="unknown arguments do_sample"):
        llm.stream_complete(QUESTION, do_sample=True)


def test_complaint_08_an_argument_of_a_call_may_repeat_a_field(llm):
    assert llm.complete(QUESTION, max_tokens=3, temperature=0.0, stop=None).raw["usage"]["completion_tokens"] == 3


def test_complaint_09_usage_is_in_the_last_response_of_every_method(llm):
    for response in (llm.chat(MESSAGES), list(llm.stream_complete(QUESTION))[-1]):
        usage = response.raw["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 6
        assert usage["prompt_tokens_details"]["cached_tokens"] == response.raw["report"].tokens(SpanKind.EXACT)


def test_complaint_10_many_calls_at_once_need_no_pad_token(plain_engine):
    assert plain_engine.tokenizer.pad_token is None
    llm = KVBoostLLM(engine=plain_engine, max_tokens=3, temperature=0)
    begun = [f"The capital of {country} is" for country in ("France", "Italy", "Japan")]
    serial = [llm.complete(text).text for text in begun]

    async def main():
        return await asyncio.gather(*map(llm.acomplete, begun))

    assert [response.text for response in asyncio.run(main())] == serial
    assert len(set(serial)) == 3


def test_complaint_12_a_conversation_may_end_with_a_tools_answer(tool_llm):
    called = ToolCallBlock(tool_call_id="123456789", tool_name="weather", tool_kwargs={"city": "Oslo"})
    messages = [
        ChatMessage(role="user", content="What is the weather in Oslo?"),
        ChatMessage(role="assistant", blocks=[called]),
        ChatMessage(role="tool", content="sunny in Oslo", additional_kwargs={"tool_call_id": "123456789"}),
    ]
    assert "Oslo" in tool_llm.chat(messages, max_tokens=12).message.content


def test_complaint_14_an_error_in_the_middle_of_a_stream_is_raised_and_nothing_hangs(plain_engine):
    with KVBoostEngine(plain_engine.model, plain_engine.tokenizer, reuse="off") as engine:
        llm = KVBoostLLM(engine=engine, max_tokens=50, temperature=0)
        stream = llm.stream_complete("Once upon a time")
        next(stream)

        async def main():
            responses = await llm.astream_complete("Once upon a time")
            await anext(responses)
            engine.close()
            with pytest.raises(EngineClosedError):
                await anext(responses)

        asyncio.run(main())
        with pytest.raises(EngineClosedError):
            next(stream)


def test_complaint_15_async_calls_do_not_block_the_loop(llm):
    async def ticks_during(call):
        ticks, done = 0, asyncio.ensure_future(call)
        while not done.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks, done.result()

    async def main():
        calls = [llm.achat(MESSAGES), llm.acomplete(QUESTION), drained(llm.astream_chat(MESSAGES))]
        return [await ticks_during(call) for call in [*calls, drained(llm.astream_complete(QUESTION))]]

    counted = asyncio.run(main())
    # A blocked loop gets one turn before a call and one after it.
    assert min(ticks for ticks, _ in counted) > 10, counted


def test_complaint_16_query_engines_send_messages_through_the_template(llm, plain_engine):
    prompt = PromptTemplate("{question}")
    assert llm.predict(prompt, question=QUESTION) == llm.chat(MESSAGES).message.content
    plain = KVBoostLLM(engine=plain_engine, max_tokens=3, temperature=0)
    assert "Paris" in plain.predict(prompt, question="The capital of France is")


def test_complaint_17_tokens_are_counted_offline_with_the_models_tokenizer(llm, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    text = "Überraschung! " * 20
    expected = len(llm.engine.tokenizer(text, add_special_tokens=False).input_ids)
    assert len(llm.token_ids(text)) == expected
    assert llm.prompt_helper()._token_counter.get_string_tokens(text) == expected


def test_complaint_18_arguments_reach_the_chat_template(tool_llm):
    plain = tool_llm.chat(MESSAGES, max_tokens=1).raw["usage"]["prompt_tokens"]
    styled = tool_llm.chat(MESSAGES, max_tokens=1, template_options={"style": "a pirate"}).raw["usage"]["prompt_tokens"]
    preset = tool_llm.model_copy(update={"template_options": {"style": "a pirate"}})
    assert styled == preset.chat(MESSAGES, max_tokens=1).raw["usage"]["prompt_tokens"] > plain


def test_complaint_19_a_prompt_over_the_window_is_an_error(llm, index):
    long = [ChatMessage(role="user", content="word " * 9000)]
    with pytest.raises(RequestError, match="context window is 8192") as caught:
        llm.chat(long)
    assert isinstance(caught.value.__cause__, ContextWindowError)
    with pytest.raises(RequestError):
        next(llm.stream_chat(long))
    with pytest.raises(RequestError):
        asyncio.run(llm.achat(long))
    # LlamaIndex answers "Empty Response" to a ValueError.
    wordy = llm.model_copy(update={"max_tokens": 8190})
    synthesizer = get_response_synthesizer(llm=wordy, prompt_helper=llm.prompt_helper())
    with pytest.raises(RequestError):
        RetrieverQueryEngine(index.as_retriever(), synthesizer).query(QUESTION)
