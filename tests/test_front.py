"""The front of replicas: what passes between it, its clients and two replicas in its own process, without Ray."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import anyio
import httpx
import pytest

pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'kvboost-rag[serve,ray]'")
pytest.importorskip("fastapi", reason="replicas need the server: pip install 'kvboost-rag[serve,ray]'")

from live_server import RED, eventually  # noqa: E402
from local_replicas import local_front, saved_model, served  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402

from kvboost_rag import Document  # noqa: E402
from kvboost_rag.replicas import handing  # noqa: E402
from kvboost_rag.replicas import replica as replica_module  # noqa: E402
from kvboost_rag.replicas.handing import Task, _Followed  # noqa: E402
from kvboost_rag.replicas.requests import CountRunning, FrontRequests  # noqa: E402
from kvboost_rag.server import Limits  # noqa: E402
from kvboost_rag.server.documents import keep_documents  # noqa: E402
from kvboost_rag.server.errors import ApiError  # noqa: E402

QUESTION = [{"role": "user", "content": "What ran?"}]
# Tokens; what is to be broken off must not be done at once.
LONG = 400
FULL = BackPressureError(num_queued_requests=4, max_queued_requests=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a model is saved."""
    return saved_model(tmp_path_factory)


async def asked(client, documents, **fields):
    body = {"model": "tiny", "messages": QUESTION, "documents": documents, "max_tokens": 2, "temperature": 0}
    return await client.post("/v1/chat/completions", json=body | fields)


async def texts(local, client, name):
    """A document's text at the front, then at each replica; None where it is not known."""
    told = await client.get(f"/v1/documents/{name}")
    held = [local.engine(replica).get_document(name) for replica in local.replicas]
    return [told.json().get("text"), *(document and document.text for document in held)]


@pytest.mark.parametrize("moment", ["on_the_way", "begun"])
async def test_what_was_posted_or_deleted_since_a_chat_came_counts_more_than_what_it_brought(
    folder, monkeypatch, moment
):
    local, client = local_front(folder, monkeypatch)
    older, newer = ({"id": "x", "text": f"It is the {age} one."} for age in ("older", "newer"))

    async def post():
        (await client.post("/v1/documents", json=newer)).raise_for_status()

    async def delete():
        await client.delete("/v1/documents/x")

    setattr(local, moment, post)
    assert (await asked(client, [older])).status_code == 200
    assert await texts(local, client, "x") == [newer["text"], newer["text"], None]
    await delete()
    setattr(local, moment, delete)
    assert (await asked(client, [older])).status_code == 200
    assert await texts(local, client, "x") == [None, None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_document_that_was_deleted_while_a_chat_was_on_its_way_is_left_nowhere(folder, monkeypatch, stream):
    local, client = local_front(folder, monkeypatch)
    (await client.post("/v1/documents", json={"id": "x", "text": "It is deleted soon."})).raise_for_status()

    async def delete():
        assert (await client.delete("/v1/documents/x")).json()["deleted"]

    local.chosen, local.on_the_way = "two", delete
    assert (await asked(client, ["x"], stream=stream)).status_code == 200
    assert await texts(local, client, "x") == [None, None, None]


async def test_a_document_that_a_replica_failed_to_forget_can_still_be_deleted(folder, monkeypatch):
    local, client = local_front(folder, monkeypatch)
    (await client.post("/v1/documents", json={"id": "x", "text": "It stays."})).raise_for_status()
    with monkeypatch.context() as patch:
        patch.setattr(local.engine("one"), "remove_documents", lambda ids: 1 / 0)
        assert (await client.delete("/v1/documents/x")).status_code == 500
    assert await texts(local, client, "x") == ["It stays.", "It stays.", None]
    assert (await client.delete("/v1/documents/x")).json()["deleted"]


async def test_a_replica_notes_what_the_front_deletes_and_takes_what_it_is_told_only_if_nothing_is_newer(
    folder, monkeypatch
):
    local, _ = local_front(folder, monkeypatch)
    tenant = local.replicas["one"]._service.tenants["red"]
    since = tenant.writes.since()
    for expected in (False, True):
        assert await local.replicas["one"].forget("red", "x") is expected
        tenant.engine.add_documents([Document("x", "It was written since.")])
    told = [Document(name, "It was told.") for name in "xy"]
    assert len(list(keep_documents(tenant, told, since, replaces=True))) == 2
    assert [tenant.engine.get_document(name).text for name in "xy"] == ["It was written since.", "It was told."]


@pytest.mark.parametrize("trusted_only", [True, False])
async def test_a_replica_that_has_not_seen_a_document_is_told_all_of_it_where_a_text_of_it_is_brought(
    folder, monkeypatch, trusted_only
):
    local, client = local_front(folder, monkeypatch, trusted_only=trusted_only)
    whole = {"id": "x", "text": "It is whole. An extract is not."}
    (await client.post("/v1/documents", json=whole)).raise_for_status()
    local.chosen = "two"
    # A text of the document that is not its own is refused where nothing else is trusted.
    extract = await asked(client, [whole | {"text": "An extract is not."}])
    assert extract.status_code == (403 if trusted_only else 200)
    assert await texts(local, client, "x") == [whole["text"]] * 3
    assert (await asked(client, [whole, "x"])).status_code == 200


async def test_what_the_front_refuses_costs_no_replica_anything_and_has_the_servers_own_words(folder, monkeypatch):
    limits = Limits(max_documents=2)
    local, client = local_front(folder, monkeypatch, limits)
    given = [{"id": name, "text": f"It is {name}."} for name in "xyz"]
    (await client.post("/v1/documents", json={"documents": given})).raise_for_status()
    local.chosen = "two"
    refused = [await asked(client, ["x", "y", "z"]), await asked(client, ["x"], model="other")]
    assert [response.status_code for response in refused] == [400, 404]
    assert local.engine("two").documents == []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(local.replicas["one"]._app), base_url="http://one", headers=client.headers
    ) as single:
        own = [await asked(single, ["x", "y", "z"]), await asked(single, ["x"], model="other")]
    assert [response.json() for response in refused] == [response.json() for response in own]


async def test_told_documents_are_encoded_at_a_place_one_by_one_and_no_more_when_nobody_waits(folder, monkeypatch):
    local, _ = local_front(folder, monkeypatch)
    replica, loop = local.replicas["one"], asyncio.get_running_loop()
    known = [{"id": name, "text": f"It is {name}."} for name in "xyz"]
    engine, places = local.engine("one"), []
    add = engine.add_documents

    async def leave():
        telling.cancel()
        # The thread is told to stop while it is in here.
        for _ in range(5):
            await asyncio.sleep(0)

    def added(documents):
        places.append((replica._service.admission.active, len(documents)))
        add(documents)
        if len(places) == 2:
            asyncio.run_coroutine_threadsafe(leave(), loop).result(30)

    monkeypatch.setattr(engine, "add_documents", added)
    telling = asyncio.ensure_future(anext(replica.answer({}, "red", known, {})))
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert places == [(1, 1)] * 2
    assert [document.id for document in engine.documents] == ["x", "y"]
    assert replica._service.admission.active == 0


async def test_the_front_is_asked_for_its_health_as_the_server_is(folder, monkeypatch):
    _, client = local_front(folder, monkeypatch)
    assert [(await client.request(method, "/health")).status_code for method in ("GET", "HEAD")] == [200, 200]


async def test_where_one_document_of_several_fails_the_others_do_not_go_on(folder, monkeypatch):
    local, client = local_front(folder, monkeypatch)
    ended = []

    async def answer(asked, *_, sizes):
        if "bad" in sizes:
            raise ApiError(503, "a replica was lost", "replica_lost")
        try:
            await asyncio.sleep(60)
        finally:
            ended.extend(sizes)
        yield

    monkeypatch.setattr(local, "_answer", answer)
    given = [{"id": name, "text": f"It is {name}."} for name in ("x", "y", "bad", "later")]
    response = await client.post("/v1/documents", json={"documents": given})
    assert response.json()["error"]["code"] == "replica_lost"
    assert {"x", "y"} <= set(ended)


def test_the_threads_of_a_replica_share_one_heap_from_before_the_model_is_loaded(folder, monkeypatch):
    steps = []
    load = replica_module.load_model

    def loaded(*given, **named):
        steps.append("load")
        return load(*given, **named)

    monkeypatch.setattr(replica_module, "load_model", loaded)
    local_front(folder, monkeypatch, heap=lambda: steps.append("heap"))
    assert steps == ["heap", "load"] * 2


def test_who_reads_nothing_of_a_stream_is_left_and_the_replica_stops(caplog):
    """That a response waits for its reader is uvicorn's work, and is seen in the server's own tests."""
    ended = []

    async def items():
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            ended.append(True)

    async def send(message):
        if message.get("body") == b"data: {}\n\n":
            await asyncio.sleep(60)

    begun = {"status": 200, "headers": [], "body": b"data: first\n\n"}
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "client": ("192.0.2.1", 9)}
    requests = FrontRequests(send_timeout=0.2)
    asyncio.run(_Followed(begun, items(), requests)(scope, asyncio.Event().wait, send))
    assert ended == [True]
    assert "kvboost_stuck_streams_total 1.0" in requests.figures()
    assert "has read nothing for 0.2 seconds" in caplog.text


@pytest.mark.parametrize(("failures", "is_answered"), [
    ((RayActorError(), FULL, FULL), True),
    ((FULL,), False),  # it was never taken
    ((RayActorError(), FULL, FULL, FULL, FULL), False),
])  # fmt: skip
def test_who_had_a_place_waits_for_another_one(monkeypatch, failures, is_answered):
    """Which replica is full when another one dies can not be arranged."""
    monkeypatch.setattr(handing, "_PAUSE", 0.01)
    left = list(failures)

    async def answer(*arguments, **fields):
        if left:
            raise left.pop(0)
        yield b"An answer."

    async def all_items():
        handle = SimpleNamespace(answer=SimpleNamespace(remote=answer))
        return [item async for item in handing._items(handle, Task({}))]

    if is_answered:
        assert asyncio.run(all_items()) == [b"An answer."]
        return
    with pytest.raises(ApiError) as told:
        asyncio.run(all_items())
    assert told.value.status == 429


@contextmanager
def stream_of(server, **fields):
    """Begin a stream at a front; yields its further lines and a client."""
    headers = {"Authorization": f"Bearer {RED}"}
    body = {"model": "tiny", "messages": QUESTION, "temperature": 0, "stream": True, "ignore_eos": True} | fields
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as streamed:
            assert streamed.status_code == 200
            lines = streamed.iter_lines()
            next(lines)
            yield (line.removeprefix("data: ") for line in lines if line), client


def test_a_front_that_stops_refuses_new_requests_and_lets_running_ones_end(folder, monkeypatch):
    local, _ = local_front(folder, monkeypatch)
    with served(local.front, Limits(drain=60)) as server:
        with stream_of(server, max_tokens=LONG) as (events, client):
            server.drain()
            assert client.get("/health").json() == {"status": "stopping"}
            refused = client.get("/v1/documents")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["retry-after"]
            assert list(events)[-1] == "[DONE]"
        eventually(lambda: server.should_exit)


def test_a_front_that_may_wait_no_longer_tells_so_and_stops_the_replica(folder, monkeypatch):
    local, _ = local_front(folder, monkeypatch)
    with served(local.front, Limits(drain=0.05)) as server:
        with stream_of(server, max_tokens=LONG) as (events, _):
            server.drain()
            assert json.loads(list(events)[-1])["error"]["code"] == "stopping"
        eventually(lambda: local.replicas["one"]._service.admission.busy == 0)


async def test_what_has_not_begun_is_broken_off_by_its_status(folder, monkeypatch):
    local, client = local_front(folder, monkeypatch)
    requests = local.front.state.front.requests

    async def end():
        assert requests.busy == 1
        requests.is_over = True
        await asyncio.sleep(60)

    local.on_the_way = end
    for _ in range(2):
        broken = await asked(client, [])
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "stopping")
    assert requests.busy == 0


async def test_the_end_reaches_those_who_wait_beside_others_that_have_just_been_let_go():
    requests, started = FrontRequests(send_timeout=1.0), []

    async def lets_go_slowly():
        started.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)

    leaving, waiting = (asyncio.ensure_future(requests.unless_over(lets_go_slowly())) for _ in range(2))
    while len(started) < 2:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0.05)
    requests.is_over = True
    requests.is_over = True
    with pytest.raises(ApiError, match="broken off"):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(ApiError, match="broken off"):
        await requests.unless_over(lets_go_slowly())
    assert len(started) == 2


async def test_what_is_asked_has_ended_when_a_stream_is_closed():
    """An asynchronous generator that is asked can not be closed."""
    requests, ended = FrontRequests(send_timeout=1.0), []

    async def items():
        try:
            yield b"first"
            await asyncio.wait_for(asyncio.sleep(60), 60)
        finally:
            ended.append(True)

    stream = items()
    await anext(stream)
    with anyio.move_on_after(0.05):
        try:
            await requests.unless_over(anext(stream))
        finally:
            await stream.aclose()
    assert ended == [True]


async def test_a_request_counts_once_all_of_it_is_there():
    requests, counted = FrontRequests(send_timeout=1.0), []
    messages = [{"type": "http.request", "body": b"1", "more_body": True}, {"type": "http.request", "body": b"2"}]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.request"}

    async def app(scope, receive, send):
        for _ in range(3):
            counted.append(requests.busy)
            await receive()
        counted.append(requests.busy)

    await CountRunning(app, requests)({"type": "http", "path": "/v1/models"}, receive, None)
    assert counted == [0, 0, 1, 1]
    assert requests.busy == 0


def test_a_second_signal_ends_the_front_and_not_the_process(folder, monkeypatch):
    """Or the replicas would be left."""
    local, _ = local_front(folder, monkeypatch)
    with served(local.front, Limits(drain=60)) as server, stream_of(server, max_tokens=LONG) as (events, _):
        server.handle_exit(signal.SIGTERM, None)
        assert not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
        assert server._captured_signals == []
