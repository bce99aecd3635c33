"""Settings, shared engines, messages, documents in prompts, calls in answers: on a tiny model."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import langchain_kvboost
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_kvboost import ChatKVBoost, KVBoostLLM, engines, release_engines, share_engine, shared_engine
from langchain_kvboost.documents import find, register, restore_reprs
from langchain_kvboost.messages import translate
from pydantic import ValidationError
from test_engine import DOCUMENTS, MUSIC, RAIN, ZEBRA, make_engine
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document as EngineDocument
from kvboost_rag import SpanKind
from kvboost_rag.structured import Abilities, FreeReader, ToolRequest

GREEDY = {"temperature": 0, "max_tokens": 6}
PLAIN = Abilities(lists_tools=False, writes_calls=False, reads_results=False)
FULL = Abilities(lists_tools=True, writes_calls=True, reads_results=True)
LINES = "First line of a text,\nsecond line with 'quotes' and \"more\",\n\tand a tab."


@pytest.fixture
def engine():
    with make_engine(repair="none") as made:
        made.add_documents(DOCUMENTS)
        yield made


@tool
def weather(place: str) -> str:
    """Tell the weather at a place."""
    return f"It rains in {place}."


@tool
def music(title: str, loud: bool = False) -> str:
    """Play a piece of music."""
    return title


def reused(answer) -> dict[str, int]:
    counts = answer.response_metadata["kvboost"]["documents"]
    return {name: c["exact"] + c["approximate"] for name, c in counts.items()}


# Engines and settings ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_registry(monkeypatch):
    """Keep the engines that other tests share out of this one."""
    monkeypatch.setattr(engines, "_engines", {})
    monkeypatch.setattr(engines, "_models", {})


def test_a_folder_is_loaded_once_for_all_objects(tmp_path, own_registry):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    chat, llm = ChatKVBoost(model=str(tmp_path), **GREEDY), KVBoostLLM(model=str(tmp_path), **GREEDY)
    other = ChatKVBoost(model=str(tmp_path), engine_options={"namespace": "tenant"})
    with ThreadPoolExecutor(4) as pool:
        made = {id(f.result()) for f in [pool.submit(chat.get_engine) for _ in range(4)]}
    assert made == {id(llm.get_engine())} != {id(other.get_engine())}
    assert other.get_engine().model is chat.get_engine().model
    assert chat.invoke("Why?").response_metadata["model_name"] == str(tmp_path)
    engine = chat.get_engine()
    release_engines()
    assert shared_engine(str(tmp_path)) is not engine


def test_making_and_showing_an_object_loads_nothing():
    chat = ChatKVBoost(model="no/such-model", api_key="secret", max_retries=3, streaming=True)
    assert "secret" not in repr(chat) + str(chat) + json.dumps(chat.asdict(), default=str)
    assert chat.profile["tool_calling"]
    assert "max_input_tokens" not in chat.profile
    with pytest.raises(ValueError, match="'no/such-model' is not a folder"):
        chat.invoke("Why?")


def test_the_profile_names_the_window_of_an_engine(engine):
    assert ChatKVBoost(engine=engine).profile["max_input_tokens"] == 1024


def test_nothing_to_answer_with_is_refused():
    with pytest.raises(ValidationError, match=r"pass model='...' or engine="):
        ChatKVBoost()
    with pytest.raises(ValueError, match="dtype='half a byte' is no dtype of torch"):
        ChatKVBoost(model="x", dtype="half a byte").invoke("Why?")


def test_another_model_for_one_call(engine, own_registry):
    with make_engine() as other:
        share_engine("other", other)
        answer = ChatKVBoost(engine=engine, model="own", **GREEDY).invoke("Why?", model="other")
        assert answer.response_metadata["model_name"] == "other"
        assert other.stats.requests == 1


def test_reuse_and_repair_arrive(engine):
    chat = ChatKVBoost(engine=engine, **GREEDY)
    prompt = f"{MUSIC}\n{RAIN}\nWhy?"
    assert chat.invoke(prompt, reuse=False).response_metadata["kvboost"]["fallback"] == "reuse is off"
    assert chat.invoke(prompt, repair="random:1.0").response_metadata["kvboost"]["repair"] == "random:1.0"
    full = ChatKVBoost(engine=engine, reuse=False, **GREEDY).invoke(prompt)
    exact = ChatKVBoost(engine=engine, repair="random:1.0", **GREEDY).invoke(prompt)
    assert full.text == exact.text
    assert full.usage_metadata["input_token_details"] == {"cache_read": 0}


def test_the_response_cache_tells_settings_and_engines_apart(engine):
    cache = InMemoryCache()
    chat = ChatKVBoost(engine=engine, cache=cache, **GREEDY)
    first = chat.invoke("Why?")
    assert chat.invoke("Why?").text == first.text
    assert engine.stats.requests == 1
    ChatKVBoost(engine=engine, cache=cache, **GREEDY, repair="random:1.0").invoke("Why?")
    ChatKVBoost(engine=engine, cache=cache, **{**GREEDY, "max_tokens": 5}).invoke("Why?")
    assert engine.stats.requests == 3
    with make_engine(namespace="other") as other:
        ChatKVBoost(engine=other, cache=cache, **GREEDY).invoke("Why?")
        assert other.stats.requests == 1


async def test_the_llms_response_cache_is_not_asked_for_calls_with_arguments(engine):
    llm = KVBoostLLM(engine=engine, cache=InMemoryCache(), **GREEDY)
    short = llm.invoke("Why?", max_tokens=1)
    whole = llm.invoke("Why?")
    assert len(short) < len(whole)
    assert llm.invoke("Why?") == await llm.ainvoke("Why?") == whole
    assert engine.stats.requests == 2
    assert llm.invoke("Why?", max_tokens=1) == await llm.ainvoke("Why?", max_tokens=1) == short
    llm.invoke("Why?", documents=["music"])
    assert engine.stats.requests == 5


def test_a_calls_repair_or_quality_stands_for_the_objects(engine):
    prompt = f"{MUSIC}\n{RAIN}\nWhy?"
    by_repair = ChatKVBoost(engine=engine, repair="none", **GREEDY)
    assert by_repair._options_of({"quality": "safe"}, None)["repair"] is None
    by_quality = ChatKVBoost(engine=engine, quality="safe", **GREEDY).invoke(prompt, repair="random:1.0")
    assert by_quality.response_metadata["kvboost"]["repair"] == "random:1.0"


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_callbacks_hear_every_token_once(kind, engine):
    heard = Tokens()
    parts = list(kind(engine=engine, **GREEDY).stream("Why?", config={"callbacks": [heard]}))
    text = "".join(getattr(part, "text", part) for part in parts)
    assert "".join(heard.tokens) == text
    assert len([t for t in heard.tokens if t]) > 1


def test_streaming_true_lets_invoke_stream_to_callbacks(engine):
    heard = Tokens()
    answer = ChatKVBoost(engine=engine, streaming=True, **GREEDY).invoke("Why?", config={"callbacks": [heard]})
    assert "".join(heard.tokens) == answer.text
    assert answer.usage_metadata["output_tokens"] == 6


def test_closing_a_stream_stops_the_compute(engine):
    chat = ChatKVBoost(engine=engine, max_tokens=500, temperature=0, generation_kwargs={"ignore_eos": True})
    stream = chat.stream("Why?")
    next(stream)
    stream.close()
    assert ChatKVBoost(engine=engine, **GREEDY).invoke("Who?").text


@pytest.mark.parametrize("kind", [ChatKVBoost, KVBoostLLM])
def test_cancelling_an_ainvoke_stops_the_compute(kind, engine, monkeypatch):
    step, steps, begun = engine._step, [], threading.Event()

    def counted(*args):
        steps.append(1)
        begun.set()
        return step(*args)

    monkeypatch.setattr(engine, "_step", counted)
    model = kind(engine=engine, max_tokens=900, temperature=0, generation_kwargs={"ignore_eos": True})

    async def cancelled():
        task = asyncio.create_task(model.ainvoke("Why?"))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    # Ends when its threads do.
    asyncio.run(cancelled())
    assert 0 < len(steps) < 800


def test_threads_and_tasks_get_the_serial_answers(engine):
    chat, llm = ChatKVBoost(engine=engine, **GREEDY, reuse=False), KVBoostLLM(engine=engine, **GREEDY, reuse=False)
    prompts = [f"{text}\nWhy {n}?" for n, text in enumerate((ZEBRA, MUSIC, RAIN) * 3)]
    asks = [(model, prompt) for prompt in prompts for model in (chat, llm)]
    serial = [_text(model.invoke(prompt)) for model, prompt in asks]
    with ThreadPoolExecutor(8) as pool:
        assert [_text(a) for a in pool.map(lambda ask: ask[0].invoke(ask[1]), asks)] == serial

    async def together():
        return await asyncio.gather(*(model.ainvoke(prompt) for model, prompt in asks))

    assert [_text(a) for a in asyncio.run(together())] == serial


# Messages ------------------------------------------------------------------------------------------------------------


def test_messages_of_every_kind_become_roles_and_text():
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "One "}, "two."], name="ann"),
        AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Three."}]),
        ChatMessage(role="critic", content="Four."),
    ]
    assert translate(messages, FULL) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One two.", "name": "ann"},
        {"role": "assistant", "content": "Three."},
        {"role": "critic", "content": "Four."},
    ]


def test_a_picture_is_refused():
    with pytest.raises(ValueError, match="block of type 'image', but the model reads text alone"):
        translate([HumanMessage([{"type": "image", "url": "x"}])], FULL)


def test_calls_and_results_are_written_where_the_template_would_drop_them():
    call = {"name": "weather", "args": {"place": "Bodø"}, "id": "1"}
    messages = [AIMessage("Let me look.", tool_calls=[call]), ToolMessage("Rain.", tool_call_id="1")]
    said, result = translate(messages, PLAIN)
    assert said["content"].startswith('Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Bodø"}}')
    assert result == {"role": "user", "content": ["<tool_response>\n", "Rain.", "\n</tool_response>"]}
    said, result = translate(messages, FULL)
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"place": "Bodø"}}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", ["Rain."], "1")


# Documents -----------------------------------------------------------------------------------------------------------


def test_an_artifact_gives_exact_boundaries_even_to_short_documents(engine):
    short = [Document(page_content="Blue."), Document(page_content="Red.", metadata={"n": 1})]
    content = "Source: a\nContent: Blue.\n\nSource: b\nContent: Red."
    messages = [HumanMessage("Colours?"), ToolMessage(content, tool_call_id="1", artifact=short)]
    answer = ChatKVBoost(engine=engine, **GREEDY).invoke(messages)
    assert sorted(reused(answer).values()) == [4, 5]
    assert len(engine.documents) == 5
    quiet = ChatKVBoost(engine=engine, **GREEDY, register_documents=False)
    unseen = [Document(page_content="few words")]
    messages[1] = ToolMessage("Something else of a few words.", tool_call_id="1", artifact=unseen)
    quiet.invoke(messages)
    assert len(engine.documents) == 5


@pytest.mark.parametrize("form", [str, lambda documents: repr(documents[0])])
def test_the_repr_of_documents_is_read_as_their_text(engine, form, caplog):
    document = Document(id="x", page_content=LINES, metadata={"page": 1})
    register(engine, [document])
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        answer = ChatKVBoost(engine=engine, **GREEDY).invoke(f"{form([document])}\nWhy?")
    assert reused(answer) == {"x": len(LINES)}
    (note,) = answer.response_metadata["kvboost"]["notes"]
    assert note.startswith("the prompt held the repr of 1 known documents")
    assert note in caplog.text


def test_a_document_as_str_writes_it_is_found_as_it_stands(engine):
    document = Document(id="x", page_content=LINES)
    register(engine, [document])
    answer = ChatKVBoost(engine=engine, **GREEDY).invoke(f"{document}\nWhy?")
    assert reused(answer) == {"x": len(LINES)}
    assert answer.response_metadata["kvboost"]["notes"] == []


def test_the_repr_of_unknown_documents_is_warned_of_and_left_alone(engine, caplog):
    text = f"{[Document(page_content=LINES)]} Why?"
    llm = KVBoostLLM(engine=engine, **GREEDY)
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        info = llm.generate([text]).generations[0][0].generation_info
    assert info["kvboost"]["notes"] == [
        "the prompt holds the repr of 1 documents that are not indexed; join their page_content in the chain instead "
        "and add them"
    ]
    assert "not indexed" in caplog.text
    assert restore_reprs("page_content='unclosed and page_content=f(x)", engine) == (
        "page_content='unclosed and page_content=f(x)",
        [],
    )


def test_a_document_is_known_by_its_text_whatever_its_id(engine):
    assert find(engine, Document(page_content=f"\n{ZEBRA} ")) == "zebra"
    assert find(engine, Document(id="other", page_content=ZEBRA)) == "zebra"
    assert find(engine, Document(id="zebra", page_content="An extract of it.")) is None
    assert find(engine, Document(page_content="")) is None


def test_registering_never_replaces_and_gives_stable_ids(engine):
    extract = Document(id="zebra", page_content="The zebra ran over the plain.")
    first = register(engine, [extract, Document(page_content=" "), extract])
    assert engine.get_document("zebra").text == ZEBRA
    assert first == register(engine, [extract, extract])
    assert engine.get_document(first[0]).text == extract.page_content


PLACES = {
    "before": ["music", "zebra"],
    "after": ["music", "zebra"],
    "system": ["music", "zebra"],
    "{documents}": ["music", "zebra"],
}


@pytest.mark.parametrize("where", PLACES)
def test_with_documents_puts_them_where_they_are_wanted(engine, where):
    chat = ChatKVBoost(engine=engine, **GREEDY)
    chain = chat.with_documents(["music", Document(page_content=ZEBRA)], documents_at=where)
    question = "Read {documents} and say why." if where == "{documents}" else "Why is it so?"
    answer = chain.invoke([SystemMessage("Be brief."), HumanMessage(question)])
    assert list(reused(answer)) == PLACES[where]
    assert reused(answer) == {"music": len(MUSIC), "zebra": len(ZEBRA)}
    call = chat._call([SystemMessage("Be brief."), HumanMessage(question)], None, chain.kwargs)
    ids = call.engine.tokenize(
        call.prompt, documents=call.options.get("documents"), template_options=call.options["template_options"]
    )
    text = engine.tokenizer.decode(ids)
    brief, asked = text.index("Be brief."), text.index("say why" if where == "{documents}" else "Why is it so?")
    assert (brief < text.index(MUSIC) < asked) == (where != "after")
    assert (text.index(ZEBRA) < text.index("user\n")) == (where == "system")


def test_a_place_that_is_not_there_is_refused(engine):
    chat = ChatKVBoost(engine=engine, **GREEDY)
    for text in ("Why?", "{documents} and {documents}"):
        with pytest.raises(ValueError, match=r"documents_at='\{documents\}' stands [02] times"):
            chat.invoke(text, documents=["music"], documents_at="{documents}")
    with pytest.raises(ValueError, match="needs a human message"):
        chat.invoke([AIMessage("Hm.")], documents=["music"], documents_at="after")
    with pytest.raises(ValueError, match="document 'nobody' is not known"):
        chat.invoke("Why?", documents=["nobody"])


@pytest.mark.parametrize("where", PLACES)
def test_no_documents_leave_no_trace(engine, where):
    chat = ChatKVBoost(engine=engine, **GREEDY)
    question = "Read and say why." if where != "{documents}" else "Read{documents} and say why."
    made = chat._call([HumanMessage(question)], None, {"documents": [], "documents_at": where})
    plain = [{"role": "user", "content": "Read and say why."}]
    documents = made.options.get("documents")
    assert list(engine.tokenize(made.prompt, documents=documents)) == list(engine.tokenize(plain))


@pytest.mark.parametrize("call", [{"documents_at": "after"}, {"most_used_first": True}])
def test_a_place_without_documents_is_refused(engine, call):
    with pytest.raises(ValueError, match="need documents; pass documents="):
        ChatKVBoost(engine=engine, **GREEDY).invoke("Why?", **call)


def test_documents_of_the_engine_and_the_llms_documents(engine):
    new = EngineDocument("new", "A text that was not known before this call.")
    made = KVBoostLLM(engine=engine, **GREEDY).generate(["Why?"], documents=[new, "rain"])
    info = made.generations[0][0].generation_info
    assert list(info["kvboost"]["documents"]) == ["new", "rain"]
    assert info["kvboost"]["documents"]["new"]["computed"] == 0


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"),
    [("any", {"weather", "music"}), ("required", {"weather", "music"}), (True, {"weather", "music"}),
     ("music", {"music"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_is_always_a_call(engine, choice, names, seed):
    chat = ChatKVBoost(engine=engine, temperature=1.0, seed=seed, max_tokens=200)
    bound = chat.bind_tools([weather, music], tool_choice=choice)
    answer = bound.invoke("Hello")
    if answer.response_metadata["finish_reason"] == "length":
        # A random model may never close a string.
        assert answer.invalid_tool_calls[0]["error"] == "cut at max_tokens; pass a larger one"
        assert answer.invalid_tool_calls[0]["name"] in names
        return
    (call,) = answer.tool_calls
    assert call["name"] in names
    streamed = [chunk for chunk in bound.stream("Hello")]
    full = sum(streamed[1:], streamed[0])
    assert [(c["name"], c["args"]) for c in full.tool_calls] == [(call["name"], call["args"])]
    assert full.text == answer.text == ""


@tool
def switch(on: bool, level: int | None = None) -> str:
    """Switch it on or off."""
    return str(on)


def test_a_forced_call_follows_its_schema(engine):
    bound = ChatKVBoost(engine=engine, temperature=1.0, max_tokens=200).bind_tools([switch], tool_choice="switch")
    for seed in range(4):
        (call,) = bound.invoke("Hello", seed=seed).tool_calls
        assert isinstance(switch.args_schema(**call["args"]).on, bool)


def test_a_choice_that_is_no_tool_is_refused(engine):
    bound = ChatKVBoost(engine=engine, **GREEDY).bind_tools([weather], tool_choice="wether")
    with pytest.raises(ValueError, match="tool_choice='any' without tools"):
        ChatKVBoost(engine=engine, **GREEDY).invoke("Why?", tool_choice="any")
    with pytest.raises(ValueError, match="tool_choice='wether' is none of the tools; pass 'any' or one of weather"):
        bound.invoke("Why?")


def test_a_schema_that_can_not_be_followed_is_refused(engine):
    schema = {"title": "odd", "type": "object", "properties": {"x": {"type": "nonsense"}}}
    chat = ChatKVBoost(engine=engine, **GREEDY)
    with pytest.raises(ValueError, match="the schema can not be followed: .*nonsense"):
        chat.with_structured_output(schema, method="json_schema").invoke("Why?")
    with pytest.raises(ValueError, match="method='magic' is not known"):
        chat.with_structured_output(schema, method="magic")
    with pytest.raises(ValueError, match="response_format of type 'xml' is not known"):
        chat.invoke("Why?", response_format={"type": "xml"})


CALL = '{"name": "weather", "arguments": {"place": "Bergen"}}'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("No call, a < b.", "No call, a < b.", []),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
        (f"Let me look.\n<tool_call>{CALL}</tool_call><tool_call>{CALL}", "Let me look.\n", ["weather", "weather"]),
        (CALL, "", ["weather"]),
        (CALL.replace("arguments", "parameters"), "", ["weather"]),
        ('{"not": "a call"}', '{"not": "a call"}', []),
        ("<tool_call>broken</tool_call> end", " end", [""]),
        ("ends with <tool_", "ends with <tool_", []),
    ],
)
def test_calls_are_read_from_free_text_in_pieces_of_any_size(text, shown, calls, size):
    reader = FreeReader(["weather"])
    pieces = [p for i in range(0, len(text), size) for p in reader.push(text[i : i + size])] + reader.end()
    assert "".join(p.text for p in pieces if p.call is None) == shown
    assert [p.name for p in pieces if p.call is not None] == calls
    assert all(json.loads(p.text) == {"place": "Bergen"} for p in pieces if p.name)


def test_tools_of_no_arguments_have_a_grammar():
    request = ToolRequest.of([{"type": "function", "function": {"name": "now"}}], "any")
    assert request.begun == '<tool_call>\n{"name": "now", "arguments":'
    assert '"type": "object"' in request.grammar


# Package -------------------------------------------------------------------------------------------------------------


def test_the_package_sees_the_engines_public_surface_only():
    for path in Path(langchain_kvboost.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("literal_eval(", "")
        assert not [word for word in ("engine._", "pickle", "eval(", "print(") if word in text], path
    assert (Path(langchain_kvboost.__file__).parent / "py.typed").is_file()


def test_import_uses_no_network_and_registers_no_hook():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from langchain_core.tracers.context import _configure_hooks as hooks\n"
        "before = len(hooks)\n"
        "import langchain_kvboost\n"
        "assert len(hooks) == before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("package", "missing", "extra"),
    [
        ("langchain_kvboost", "langchain_core", "langchain"),
        ("langchain_kvboost", "faiss", "langchain"),
        ("llama_index.llms.kvboost", "llama_index.core", "llama-index"),
    ],
)
def test_a_missing_extra_is_named(package, missing, extra):
    code = f"import sys\nsys.modules[{missing!r}] = None\nimport {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith(f'pip install "kvboost-rag[{extra}]"')


def _text(answer) -> str:
    return answer if isinstance(answer, str) else answer.text


def test_spans_are_summed_by_document(engine):
    answer = ChatKVBoost(engine=engine, **GREEDY).invoke(f"{RAIN} {ZEBRA} {RAIN} Why?")
    counts = answer.response_metadata["kvboost"]["documents"]["rain"]
    assert set(counts) == {kind.value for kind in SpanKind}
    assert sum(counts.values()) == 2 * len(RAIN)
