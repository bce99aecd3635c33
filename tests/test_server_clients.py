"""The server as clients meet it: OpenAI's own, LangChain's, LlamaIndex's. Each answer is the engine's own."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")
openai = pytest.importorskip("openai", reason="pip install openai")

from live_server import DOCUMENTS, MUSIC, RAIN, ZEBRA, added, live_server, own_engine  # noqa: E402

IDS = ["rain", "zebra"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What ran?"}]
ASKED = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]},
    },
}


@pytest.fixture(scope="module")
def live():
    with live_server() as running:
        added(running)
        yield running


@pytest.fixture(scope="module")
def engine():
    with own_engine() as made:
        yield made


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine):
    return engine.generate(MESSAGES, documents=IDS, max_tokens=24, temperature=0)


def test_a_chat_is_the_engines_answer_with_usage_and_report(client, expected):
    answer = client.chat.completions.create(**ASKED, extra_body={"documents": IDS})
    assert answer.choices[0].message.content == expected.text != ""
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    counts = answer.kvboost["tokens"]
    assert answer.usage.prompt_tokens == expected.prompt_tokens == sum(counts.values())
    assert answer.usage.prompt_tokens_details.cached_tokens == counts["exact"] + counts["approximate"]
    assert counts["approximate"] > 100 and counts["recomputed"] > 0
    assert set(answer.kvboost["documents"]) == set(IDS)
    assert answer.kvboost["repair"] == expected.report.repair == "selective:4"
    assert 0 < answer.kvboost["ttft"] <= answer.kvboost["total"]


def test_a_stream_is_the_same_text_in_pieces(client, expected):
    chunks = list(
        client.chat.completions.create(
            **ASKED, stream=True, stream_options={"include_usage": True}, extra_body={"documents": IDS}
        )
    )
    *spoken, last, usage = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    assert len(spoken) > 5
    assert "".join(c.choices[0].delta.content for c in spoken) == expected.text
    assert last.choices[0].finish_reason == expected.finish_reason
    assert last.kvboost["tokens"]["approximate"] > 100
    assert all(c.usage is None for c in (*spoken, last))
    assert usage.choices == [] and usage.usage.prompt_tokens == expected.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_async_clients_at_once_get_what_each_gets_alone(live, engine):
    questions = [f"Why {i}?" for i in range(6)]
    alone = [
        engine.generate([{"role": "user", "content": q}], documents=IDS, max_tokens=12, temperature=0).text
        for q in questions
    ]

    async def ask(client, question, streamed):
        asked = {**ASKED, "messages": [{"role": "user", "content": question}], "max_tokens": 12}
        answer = await client.chat.completions.create(**asked, stream=streamed, extra_body={"documents": IDS})
        if not streamed:
            return answer.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in answer])

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, q, bool(i % 2)) for i, q in enumerate(questions)))

    assert asyncio.run(together()) == alone


def test_documents_that_a_request_brings_are_kept_for_the_next(client, engine):
    heron = "A heron stands in the reeds, on one leg, and waits for a fish all morning."
    brought = [{"id": "new", "text": heron}, "zebra"]
    first = client.chat.completions.create(**ASKED, extra_body={"documents": brought})
    counts = first.kvboost["documents"]["new"]
    assert counts["approximate"] > 60 and counts["computed"] == 0
    assert client.chat.completions.create(**ASKED, extra_body={"documents": ["new", "zebra"]}).choices == first.choices
    other = [{"id": "zebra", "text": "Another text altogether, which an extractor made of something else."}]
    asked = client.chat.completions.create(**ASKED, extra_body={"documents": other})
    assert asked.kvboost["documents"]["zebra"]["computed"] == len(other[0]["text"])
    unkept = [{"id": "passing", "text": "This text is only passing through, and nobody keeps any of it."}]
    client.chat.completions.create(**ASKED, extra_body={"documents": unkept, "register_documents": False})
    with pytest.raises(openai.BadRequestError, match="'passing' is not known"):
        client.chat.completions.create(**ASKED, extra_body={"documents": ["passing"]})


def test_documents_are_found_inside_messages(client, engine):
    parts = [{"type": "text", "text": f"Read: {RAIN} "}, {"type": "text", "text": MUSIC}]
    answer = client.chat.completions.create(**{**ASKED, "messages": [{"role": "user", "content": parts}]})
    assert set(answer.kvboost["documents"]) == {"rain", "music"}
    expected = engine.generate([{"role": "user", "content": f"Read: {RAIN} {MUSIC}"}], max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == expected.text


def test_repair_and_reuse_are_the_requests_choice(client, engine):
    full = client.chat.completions.create(**ASKED, extra_body={"documents": IDS, "reuse": False})
    assert full.usage.prompt_tokens_details.cached_tokens == 0 and full.kvboost["fallback"] == "reuse is off"
    repaired = client.chat.completions.create(**ASKED, extra_body={"documents": IDS, "repair": "random:1.0"})
    assert repaired.kvboost["tokens"]["approximate"] == 0
    assert repaired.choices[0].message.content == full.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="unknown repair 'magic'"):
        client.chat.completions.create(**ASKED, extra_body={"repair": "magic"})


def test_sampling_is_repeatable_and_stop_strings_stop(client, engine, expected):
    warm = {**ASKED, "temperature": 1.3, "top_p": 0.9, "seed": 7}
    texts = {client.chat.completions.create(**warm).choices[0].message.content for _ in range(2)}
    own = engine.generate(MESSAGES, max_tokens=24, temperature=1.3, top_p=0.9, seed=7)
    assert texts == {own.text}
    plain = client.chat.completions.create(**ASKED).choices[0].message.content
    stop = plain[2:4]
    stopped = client.chat.completions.create(**ASKED, stop=[stop, "never"])
    assert stopped.choices[0].message.content == plain[: plain.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(**{**ASKED, "max_tokens": 3}, extra_body={"ignore_eos": True})
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    other = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert other.choices == short.choices


def test_completions_whole_and_streamed(client, engine):
    asked = {"model": "tiny", "prompt": f"{ZEBRA} And", "temperature": 0, "max_tokens": 12}
    expected = engine.generate(asked["prompt"], temperature=0, max_tokens=12)
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == expected.text
    assert answer.usage.prompt_tokens_details.cached_tokens == expected.prompt_tokens - sum(
        s.tokens for s in expected.report.spans if s.kind.value in ("computed", "recomputed")
    )
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == expected.text
    assert chunks[-1].usage == answer.usage
    laid_out = client.completions.create(**{**asked, "prompt": "What ran?"}, extra_body={"documents": IDS})
    own = engine.generate("What ran?", documents=IDS, temperature=0, max_tokens=12)
    assert laid_out.choices[0].text == own.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_follows_its_schema_whole_and_streamed(client, choice):
    asked = {**ASKED, "max_tokens": 80, "tools": [TOOL], "tool_choice": choice}
    message = client.chat.completions.create(**asked).choices[0]
    assert message.finish_reason == "tool_calls" and message.message.content is None
    (call,) = message.message.tool_calls
    assert call.function.name == "weather" and isinstance(json.loads(call.function.arguments)["sunny"], bool)
    chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    (streamed,) = [call for c in chunks for call in c.delta.tool_calls or ()]
    assert streamed.index == 0 and streamed.function.arguments == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    history = [*MESSAGES, message.message, {"role": "tool", "tool_call_id": call.id, "content": RAIN}]
    answer = client.chat.completions.create(**{**asked, "messages": history, "tool_choice": "none"})
    assert answer.kvboost["documents"]["rain"]["computed"] == 0


def test_a_call_that_is_cut_says_so(client):
    cut = client.chat.completions.create(**{**ASKED, "max_tokens": 6}, tools=[TOOL], tool_choice="required")
    assert cut.choices[0].finish_reason == "length"
    assert "a tool call can not be made" in cut.kvboost["notes"][0]


def test_json_follows_its_schema(client):
    from pydantic import BaseModel

    class Weather(BaseModel):
        sunny: bool
        wet: bool

    parsed = client.chat.completions.parse(**{**ASKED, "max_tokens": 80}, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    loose = client.chat.completions.create(**{**ASKED, "max_tokens": 80}, response_format={"type": "json_object"})
    assert isinstance(json.loads(loose.choices[0].message.content), dict)
    text = client.chat.completions.create(**ASKED, response_format={"type": "text"})
    assert text.choices == client.chat.completions.create(**ASKED).choices


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.models.retrieve("gpt")


def test_langchain_openai(live, engine, expected):
    langchain_openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    chat = langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0,
        extra_body={"documents": IDS},
    )  # fmt: skip
    messages = [("system", "Be brief."), ("user", "What ran?")]
    answer = chat.invoke(messages)
    assert answer.content == expected.text
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 100
    assert "".join(chunk.text for chunk in chat.stream(messages)) == expected.text
    called = chat.bind_tools([TOOL], tool_choice="weather").bind(max_tokens=80).invoke(messages)
    assert isinstance(called.tool_calls[0]["args"]["sunny"], bool)
    for method in ("function_calling", "json_schema"):
        schema = {"title": "weather", "description": "Weather.", **TOOL["function"]["parameters"]}
        structured = chat.with_structured_output(schema, method=method)
        assert isinstance(structured.invoke(messages, max_tokens=80)["sunny"], bool)


def test_llama_index_openai_like(live, engine, expected):
    openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="pip install llama-index-llms-openai-like")
    from llama_index.core.llms import ChatMessage

    llm = openai_like.OpenAILike(
        model="tiny", api_base=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0,
        is_chat_model=True, context_window=1024, additional_kwargs={"extra_body": {"documents": IDS}},
    )  # fmt: skip
    messages = [ChatMessage(role=m["role"], content=m["content"]) for m in MESSAGES]
    assert llm.chat(messages).message.content == expected.text
    assert "".join(r.delta or "" for r in llm.stream_chat(messages)) == expected.text
    plain = llm.model_copy(update={"is_chat_model": False, "additional_kwargs": {}})
    own = engine.generate(f"{ZEBRA} And", temperature=0, max_tokens=24).text
    assert plain.complete(f"{ZEBRA} And").text == own


def test_documents_are_added_listed_shown_and_deleted(live):
    with live.client() as client:
        listed = client.get("/v1/documents").json()
        assert [d["id"] for d in listed["data"]][:3] == [d.id for d in DOCUMENTS]
        page = client.get("/v1/documents", params={"limit": 1, "after": "zebra"}).json()
        assert [d["id"] for d in page["data"]] == ["music"] and page["has_more"]
        one = {"id": "a/b c?", "text": "An id may hold what a path may not.", "metadata": {"page": 3}, "version": "2"}
        assert client.post("/v1/documents", json=one).json()["metadata"] == {"page": 3}
        got = client.get("/v1/documents/a%2Fb%20c%3F").json()
        assert (got["text"], got["usage"]["used"]) == (one["text"], 0)
        body = {"stream": True, "documents": [one, one | {"id": "2"}]}
        with client.stream("POST", "/v1/documents", json=body) as got:
            events = [line.removeprefix("data: ") for line in got.iter_lines() if line]
        assert [json.loads(e)["done"] for e in events[:-1]] == [1, 2] and events[-1] == "[DONE]"
        for document_id in ("a%2Fb%20c%3F", "2"):
            assert client.delete(f"/v1/documents/{document_id}").json()["deleted"]
            assert client.delete(f"/v1/documents/{document_id}").status_code == 404


def test_metrics_tell_what_was_served(live, client):
    client.chat.completions.create(**ASKED, extra_body={"documents": IDS})
    with live.client() as plain:
        text = plain.get("/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    figures = {name: float(value) for name, value in lines}
    stats = live.service.engines[""].stats
    for kind, count in stats.tokens.items():
        assert figures[f'kvboost_prompt_tokens_total{{kind="{kind}"}}'] == count > 0
    assert figures["kvboost_ttft_seconds_count"] == stats.requests
    assert figures['kvboost_kv_bytes{tier="memory"}'] == stats.store_bytes > 0
    assert 0 < figures["kvboost_hit_rate"] < 1
    assert figures["kvboost_completion_tokens_total"] > 24
    assert figures["kvboost_queue_length"] == figures["kvboost_active_requests"] == 0
    assert figures["kvboost_evictions_total"] == 0
    assert figures['kvboost_requests_total{path="/v1/chat/completions",status="200"}'] > 5
