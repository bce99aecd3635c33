"""Documents that chats bring along: what becomes of them when the chat is refused, or overtaken by others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

from live_server import ZEBRA, added, eventually, live_server, opened, own_engine  # noqa: E402

from kvboost_rag import Document  # noqa: E402
from kvboost_rag.server import Limits  # noqa: E402
from kvboost_rag.server.documents import keep_documents  # noqa: E402
from kvboost_rag.server.service import Tenant  # noqa: E402

CHAT = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "What ran?"}], "temperature": 0, "max_tokens": 4}
LONG = ASKED | {"max_tokens": 400, "ignore_eos": True, "stream": True}
HERON = "A heron stands in the reeds, on one leg, and waits for a fish all morning."
BROUGHT = {"documents": [{"id": "heron", "text": HERON}, "zebra"]}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


@pytest.fixture(scope="module")
def live():
    with live_server(limits=Limits(max_concurrent=1, max_queue=2, max_prompt_tokens=700)) as running:
        added(running)
        yield running


@pytest.fixture(scope="module")
def client(live):
    with live.client() as made:
        yield made


def known(client) -> list[str]:
    return [document["id"] for document in client.get("/v1/documents").json()["data"]]


@pytest.mark.parametrize(
    "change",
    [
        {"repair": "magic"},
        {"temperature": -1},
        {"response_format": BAD_SCHEMA},
        {"tool_choice": "required"},
        {"chat_template_kwargs": {"messages": "none"}},
        {"max_tokens": 1000},
        {"max_tokens": 5000},
        {"messages": [{"role": "user", "content": "x" * 650}]},
        {"messages": [{"role": "assistant", "content": "There is no user."}]},
        {"documents": [*BROUGHT["documents"], "nobody"]},
        {"documents": [*BROUGHT["documents"], {"id": "long", "text": "y" * 1100}]},
        {"model": "gpt"},
        {"n": 2},
    ],
)
def test_a_refused_chat_leaves_no_documents(client, change):
    before = known(client)
    assert client.post(CHAT, json=ASKED | BROUGHT | change).status_code in (400, 404)
    assert known(client) == before


def test_a_refused_completion_leaves_none_either(client):
    before = known(client)
    asked = {"model": "tiny", "prompt": "x" * 650, "max_tokens": 4}
    assert client.post("/v1/completions", json=asked | BROUGHT).status_code == 400
    assert known(client) == before


def test_a_chat_that_finds_no_place_leaves_none_and_one_that_is_answered_does(live, client):
    with opened(live, CHAT, LONG) as running, opened(live, CHAT, ASKED), opened(live, CHAT, ASKED):
        assert running.recv(20).startswith(b"HTTP/1.1 200")
        eventually(lambda: live.service.admission.waiting == 2)
        assert client.post(CHAT, json=ASKED | BROUGHT).status_code == 429
        assert "heron" not in known(client)
    eventually(live.idle)
    assert client.post(CHAT, json=ASKED | BROUGHT).status_code == 200
    assert "heron" in known(client)
    client.delete("/v1/documents/heron").raise_for_status()


def test_what_is_deleted_while_a_chat_waits_does_not_come_back(live, client):
    client.post("/v1/documents", json=BROUGHT["documents"][0]).raise_for_status()
    with ThreadPoolExecutor(1) as pool, opened(live, CHAT, LONG) as running:
        assert running.recv(20).startswith(b"HTTP/1.1 200")
        waiting = pool.submit(client.post, CHAT, json=ASKED | BROUGHT)
        eventually(lambda: live.service.admission.waiting == 1)
        client.delete("/v1/documents/heron").raise_for_status()
        running.close()
        answer = waiting.result(60).json()
    # It is answered all the same: it has the text with it.
    assert answer["kvboost"]["documents"]["heron"] == {
        "exact": 0, "approximate": 0, "recomputed": 0, "computed": len(HERON)
    }
    assert client.get("/v1/documents/heron").status_code == 404
    # Who asks from now on knows of the deletion, and brings it anew.
    client.post(CHAT, json=ASKED | BROUGHT).raise_for_status()
    assert client.get("/v1/documents/heron").json()["text"] == HERON
    client.delete("/v1/documents/heron").raise_for_status()


def test_who_leaves_brings_no_more_documents(live, client):
    before = known(client)
    brought = [{"id": f"brought-{i}", "text": f"The {i}th."} for i in range(45)]
    engine = live.service.engines[""]
    with opened(live, CHAT, ASKED | {"documents": brought}):
        eventually(lambda: engine.get_document("brought-0") is not None)
    eventually(live.idle)
    new = [document_id for document_id in known(client) if document_id not in before]
    assert 0 < len(new) < 45
    engine.remove_documents(new)


def test_nobody_waits_for_a_document_of_others_that_is_being_written(live, client):
    """A forward of a long document takes many seconds, and requests come to the event loop."""
    writes = live.service.tenants[""].writes
    with ThreadPoolExecutor(1) as pool, writes.writing("heron"):
        assert client.get("/health", timeout=20).status_code == 200
        asked = ASKED | {"documents": ["zebra", {"id": "crane", "text": "A crane dances."}]}
        assert client.post(CHAT, json=asked, timeout=20).status_code == 200
        assert "crane" in known(client)
        client.delete("/v1/documents/crane", timeout=20).raise_for_status()
        same = pool.submit(client.post, "/v1/documents", json=BROUGHT["documents"][0])
        assert client.get("/health", timeout=20).status_code == 200
        with pytest.raises(TimeoutError):
            same.result(0.3)
    assert same.result(20).status_code == 200
    client.delete("/v1/documents/heron").raise_for_status()


def keep(*arguments) -> None:
    for _ in keep_documents(*arguments):
        pass


def test_of_two_writers_at_once_the_list_of_documents_wins():
    newest = Document("heron", "Herons fly south in autumn, and nobody knows how they find the way.")
    with own_engine() as engine:
        caller = Tenant("", engine)
        early, late = caller.writes.since(), None
        with caller.writes.writing("heron"):
            overtaken = threading.Thread(target=keep, args=(caller, [Document("heron", HERON)], early))
            overtaken.start()
            engine.add_documents([newest])
        overtaken.join(30)
        assert engine.get_document("heron") == newest
        with caller.writes.writing("heron"):
            engine.remove_documents(["heron"])
        keep(caller, [Document("heron", HERON)], early)
        assert engine.get_document("heron") is None
        late = caller.writes.since()
        keep(caller, [Document("heron", HERON), Document("zebra", "Another text.")], late)
        assert engine.get_document("heron").text == HERON and engine.get_document("zebra").text == ZEBRA
