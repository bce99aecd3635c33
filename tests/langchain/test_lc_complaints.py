"""What users of local models complained about, one test each, named after the complaint (LC: LangChain's issue)."""

from __future__ import annotations

import asyncio
import copy
import time

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_kvboost import ChatKVBoost, KVBoostLLM
from pydantic import BaseModel, ValidationError
from test_engine import RAIN, ZEBRA, make_engine
from tiny import TEMPLATE, tiny_model, tiny_tokenizer

from kvboost_rag import ContextWindowError, Document, EngineClosedError, KVBoostEngine

GREEDY = {"temperature": 0, "max_tokens": 8}
NATIVE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if thinking %}<think>{% endif %}{% endif %}"
    "{# roles: 'tool' #}"
)


@tool
def weather(place: str) -> str:
    """Tell the weather at a place."""
    return f"It rains in {place}."


@pytest.fixture(scope="module")
def tiny():
    with make_engine(repair="none") as made:
        yield made


@pytest.fixture(scope="module")
def native():
    """An engine whose template lists tools, writes calls and knows an option."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = NATIVE
    with KVBoostEngine(tiny_model("llama"), tokenizer, repair="none") as made:
        yield made


def prompt_of(chat: ChatKVBoost, messages, **call) -> str:
    """What the model is given."""
    made = chat._call([*messages], None, call)
    options = made.options["template_options"]
    return made.engine.tokenizer.decode(made.engine.tokenize(made.prompt, template_options=options))


def bound(tools, choice=None) -> dict:
    return ChatKVBoost(model="any").bind_tools(tools, tool_choice=choice).kwargs


@pytest.mark.parametrize("name", ["tiny", "native"])
def test_01_tools_are_in_the_local_prompt(name, request):
    """LC #29033, #30453, #24430."""
    chat = ChatKVBoost(engine=request.getfixturevalue(name), **GREEDY)
    text = prompt_of(chat, [HumanMessage("Will it rain?")], **bound([weather]))
    assert "Tell the weather at a place." in text
    assert ("TOOLS" in text) == (name == "native")
    assert "Tell the weather" not in prompt_of(chat, [HumanMessage("Will it rain?")], **bound([weather], "none"))


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
async def test_02_async_methods_exist_and_work(kind, tiny):
    """LC #34134, #35095."""
    model = kind(engine=tiny, **GREEDY)
    whole = await model.ainvoke("Why?")
    parts = [part async for part in model.astream("Why?")]
    text, streamed = (whole.text, "".join(p.text for p in parts)) if kind is ChatKVBoost else (whole, "".join(parts))
    assert text
    assert text == streamed == getattr(model.invoke("Why?"), "text", text)
    assert len(await model.abatch(["Why?", "Who?"])) == 2


@pytest.mark.real
@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_03_stop_works_everywhere_and_across_tokens(kind, engine):
    """LC #22601, #27267."""
    model = kind(engine=engine, temperature=0, max_tokens=9)
    text = _text(model.invoke("Hello"))
    # Three characters in the middle of a word: no token begins or ends there.
    stop = next(text[i : i + 3] for i in range(3, len(text)) if text[i : i + 3].isalpha() and text[i - 1].isalpha())
    expected = text[: text.index(stop)]
    assert _text(model.invoke("Hello", stop=[stop])) == expected
    assert "".join(_text(part) for part in model.stream("Hello", stop=[stop])) == expected
    assert _text(kind(engine=engine, temperature=0, max_tokens=9, stop=stop).invoke("Hello")) == expected


@pytest.mark.real
def test_04_the_template_is_applied_and_generation_ends(engine, smollm2):
    """LC #19933, #19770, #29126."""
    chat = ChatKVBoost(engine=engine, temperature=0, max_tokens=40)
    answer = chat.invoke([HumanMessage("Hello")])
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] < 40
    model, tokenizer = smollm2
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert answer.usage_metadata["input_tokens"] == len(ids["input_ids"])
    with_template = KVBoostLLM(engine=engine, temperature=0, max_tokens=40, use_chat_template=True)
    assert with_template.invoke("Hello") == answer.text


def test_04b_no_template_is_an_error_that_names_the_remedy():
    """LC #29126."""
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(template=False)) as engine:
        with pytest.raises(ValueError, match="no chat template for messages; pass the prompt as text"):
            ChatKVBoost(engine=engine, **GREEDY).invoke("Why?")
        assert KVBoostLLM(engine=engine, **GREEDY).invoke("Why?")


@pytest.mark.real
@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_05_the_answer_does_not_hold_the_prompt(kind, engine):
    """LC #25916, #24929."""
    prompt = "The capital of France is"
    text = _text(kind(engine=engine, temperature=0, max_tokens=5).invoke(prompt))
    assert text
    assert prompt not in text


def test_06_the_prompt_begins_once():
    """Double beginning of sequence."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    with KVBoostEngine(tiny_model("llama"), tokenizer) as engine:
        chat = ChatKVBoost(engine=engine, **GREEDY)
        assert prompt_of(chat, [HumanMessage("Why?")]).count("<bos>") == 1


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_07_keyword_arguments_of_a_call_count_or_are_refused(kind, tiny):
    """LC #7192, #10648."""
    model = kind(engine=tiny, **GREEDY)
    assert _usage(model, max_tokens=3) == 3
    assert _usage(model, max_tokens=5, ignore_eos=True, seed=3, temperature=1.0, top_p=0.9) == 5
    assert model.bind(max_tokens=1, stop=["x"]).invoke("Why?") is not None
    with pytest.raises(ValueError, match="a call can not take max_new_tokens; it takes .*max_tokens"):
        model.invoke("Why?", max_new_tokens=3)
    with pytest.raises(ValueError, match="temperature=-1 can not be used"):
        model.invoke("Why?", temperature=-1)


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_08_an_argument_given_twice_is_no_type_error(kind, tiny):
    """Duplicate generate keyword."""
    model = kind(engine=tiny, **GREEDY, generation_kwargs={"repetition_penalty": 1.3, "ignore_eos": True})
    assert model.invoke("Why?", repetition_penalty=1.1) is not None
    # Of one candidate, sampling takes the greedy one.
    hot = kind(engine=tiny, max_tokens=8, temperature=5.0, generation_kwargs={"top_k": 1})
    greedy = _text(kind(engine=tiny, **GREEDY).invoke("Why?"))
    assert _text(hot.invoke("Why?")) == greedy
    assert any(_text(hot.invoke("Why?", top_k=0, seed=seed)) != greedy for seed in range(3))
    with pytest.raises(ValidationError, match="generation_kwargs can not hold max_tokens"):
        kind(engine=tiny, generation_kwargs={"max_tokens": 3})


def test_09_usage_is_in_the_message_and_in_the_metadata(tiny):
    """usage_metadata and response_metadata."""
    tiny.add_documents([Document("zebra", ZEBRA)])
    chat = ChatKVBoost(engine=tiny, **GREEDY)
    whole = chat.invoke(f"{ZEBRA}\nWhy?")
    chunks = list(chat.stream(f"{ZEBRA}\nWho?"))
    assert whole.usage_metadata["input_token_details"]["cache_read"] >= len(ZEBRA)
    assert whole.usage_metadata["total_tokens"] == sum(
        whole.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    assert whole.response_metadata["kvboost"]["documents"]["zebra"]["approximate"] == len(ZEBRA)
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    result = KVBoostLLM(engine=tiny, **GREEDY).generate(["Why?", "Who?"])
    used = [g[0].generation_info["usage_metadata"]["total_tokens"] for g in result.generations]
    assert result.llm_output["token_usage"]["total_tokens"] == sum(used)


def test_10_a_batch_needs_no_pad_token():
    """LC #26207."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = None
    with KVBoostEngine(tiny_model("llama"), tokenizer) as engine:
        chat, llm = ChatKVBoost(engine=engine, **GREEDY), KVBoostLLM(engine=engine, **GREEDY)
        prompts = ["Why?", "Who is it that asks this question?"]
        assert [m.text for m in chat.batch(prompts)] == [chat.invoke(p).text for p in prompts]
        assert llm.batch(prompts) == [llm.invoke(p) for p in prompts]


def test_11_there_is_one_way_to_name_a_device(tiny):
    """LC #10985, #23628."""
    with pytest.raises(ValidationError, match="device_map"):
        ChatKVBoost(model="smollm2", device_map="auto")
    with pytest.raises(ValidationError, match=r"settled with engine=\.\.\.; leave them out"):
        ChatKVBoost(engine=tiny, device="cpu")


@pytest.mark.parametrize("name", ["tiny", "native"])
def test_12_the_last_message_may_be_a_tools(name, request):
    """LC #15232."""
    chat = ChatKVBoost(engine=request.getfixturevalue(name), **GREEDY)
    call = {"name": "weather", "args": {"place": "Bergen"}, "id": "1"}
    result = ToolMessage("It rains.", tool_call_id="1")
    messages = [HumanMessage("Will it rain?"), AIMessage("", tool_calls=[call]), result]
    text = prompt_of(chat, messages)
    assert text.index("Will it rain?") < text.index("weather") < text.index("It rains.")
    assert ("CALL weather" in text) == (name == "native")
    assert chat.invoke(messages).text


@pytest.mark.parametrize("name", ["tiny", "native"])
def test_13_a_forced_call_is_begun_in_the_prompt(name, request):
    """The answer goes on where the call's own part begins."""
    chat = ChatKVBoost(engine=request.getfixturevalue(name), **GREEDY)
    text = prompt_of(chat, [HumanMessage("Will it rain?")], **bound([weather], "any"))
    assert text.endswith('<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments":')


class Trip(BaseModel):
    """A trip."""

    days: int
    by_train: bool


@pytest.mark.real
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_13_structured_output_is_always_of_its_class(method, engine):
    """LC #32197, #29569."""
    chat = ChatKVBoost(engine=engine, temperature=1.5, seed=1, max_tokens=40)
    made = chat.with_structured_output(Trip, method=method).invoke("Three days in Bergen, by train.")
    assert isinstance(made, Trip)


def test_14_an_exception_in_the_middle_reaches_the_stream():
    """A stream that hangs after an exception."""
    engine = make_engine()
    chat = ChatKVBoost(engine=engine, temperature=0, max_tokens=50, generation_kwargs={"ignore_eos": True})
    stream = chat.stream("Why?")
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(stream)


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
async def test_15_async_does_not_block_the_loop(kind, tiny):
    """A blocked event loop."""
    model = kind(engine=tiny, temperature=0, max_tokens=60, generation_kwargs={"ignore_eos": True})
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await model.ainvoke("Why?")
    invoked, ticks = ticks, 0
    async for _ in model.astream("Why?"):
        pass
    ticking.cancel()
    assert invoked > 5
    assert ticks > 5


def test_17_tokens_are_counted_offline_with_the_models_tokenizer(tiny):
    """LC #12982."""
    chat = ChatKVBoost(engine=tiny, **GREEDY)
    assert chat.get_num_tokens("Why?") == len("Why?")
    assert KVBoostLLM(engine=tiny).get_num_tokens("Why?") == len("Why?")
    messages = [SystemMessage("Be brief."), HumanMessage("Why?")]
    assert chat.get_num_tokens_from_messages(messages) == chat.invoke(messages).usage_metadata["input_tokens"]
    assert chat.get_num_tokens_from_messages(messages, [weather]) > chat.get_num_tokens_from_messages(messages)


def test_18_arguments_of_the_template_arrive(native):
    """LC #31489."""
    chat = ChatKVBoost(engine=native, **GREEDY, chat_template_kwargs={"thinking": True})
    assert prompt_of(chat, [HumanMessage("Why?")]).endswith("<think>")
    assert not prompt_of(chat, [HumanMessage("Why?")], chat_template_kwargs={"thinking": False}).endswith("<think>")


def test_19_a_prompt_over_the_context_window_is_an_error(tiny):
    """Garbage after a warning."""
    chat = ChatKVBoost(engine=tiny, **GREEDY)
    for ask in (chat.invoke, lambda prompt: list(chat.stream(prompt)), KVBoostLLM(engine=tiny, **GREEDY).invoke):
        with pytest.raises(ContextWindowError, match="context window is 1024"):
            ask("x" * 2000)


def test_a_timeout_reaches_the_caller(tiny):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timeout=0.2"):
        ChatKVBoost(engine=tiny, max_tokens=900, timeout=0.2, generation_kwargs={"ignore_eos": True}).invoke(RAIN)
    assert time.monotonic() - started < 60


def _text(answer) -> str:
    return answer if isinstance(answer, str) else answer.text


def _usage(model, **call) -> int:
    if isinstance(model, ChatKVBoost):
        return model.invoke("Why?", **call).usage_metadata["output_tokens"]
    generation = model.generate(["Why?"], **call).generations[0][0]
    return generation.generation_info["usage_metadata"]["output_tokens"]


