"""Replicas on Ray Serve: what one engine answers, at the replica that has the documents, whatever happens to others."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

ray = pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'kvboost-rag[serve,ray]'")
pytest.importorskip("fastapi", reason="replicas need the server: pip install 'kvboost-rag[serve,ray]'")

from fastapi import FastAPI  # noqa: E402
from live_server import DOCUMENTS, KEYS, OPERATOR, OPTIONS, RED, eventually, own_engine  # noqa: E402
from local_replicas import saved_model, served  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402

from kvboost_rag import RedisTier  # noqa: E402
from kvboost_rag.affinity import rank_replicas  # noqa: E402
from kvboost_rag.errors import ReplicasError  # noqa: E402
from kvboost_rag.replicas import (  # noqa: E402
    ReplicaOptions,
    create_front,
    serve_replicas,
    serving,
    start_replicas,
    stop_replicas,
)
from kvboost_rag.replicas.logs import TellFailures, log_to_stderr, logging_failures  # noqa: E402
from kvboost_rag.replicas.serving import check_room  # noqa: E402
from kvboost_rag.replicas.starting import are_running, reason_of  # noqa: E402
from kvboost_rag.server import Limits, taken_place  # noqa: E402
from kvboost_rag.server.schemas import NewDocument  # noqa: E402

QUESTION = [{"role": "user", "content": "What ran?"}]
MADE = [f"made-{i}" for i in range(12)]
# Tokens; what is to be broken off must not be done at once.
LONG = 400
PASSWORD = "s3cr3t-of-mine"
FULL = BackPressureError(num_queued_requests=4, max_queued_requests=4)


@pytest.fixture(scope="module")
def store():
    """A tier that the replicas share, where there is one."""
    if shutil.which("redis-server") is None:
        yield None
        return
    from redis_server import running

    with running("--requirepass", PASSWORD) as server:
        yield f"redis://:{PASSWORD}@127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a model is saved."""
    return saved_model(tmp_path_factory)


@pytest.fixture(scope="module")
def options(folder, store):
    engine = OPTIONS | {"store": store and RedisTier(store, prefill_rate=1.0)}
    limits = Limits(max_concurrent=4, max_queue=4)
    return ReplicaOptions(str(folder), "tiny", KEYS, limits, engine, {"num_cpus": 0.1})


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _start_ray() -> None:
    """Ray gives its own processes half a minute to start, which they exceed where much else begins at the same time."""
    for attempt in range(3):
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        except Exception as error:
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
        else:
            return


@pytest.fixture(scope="module")
def front(options, monkeypatch_module):
    """The application in front of two replicas."""
    # Ray gives its processes what others leave of the CPU, which may be nothing beside other tests.
    monkeypatch_module.setenv("RAY_worker_niceness", "0")
    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    _start_ray()
    try:
        yield create_front(start_replicas(options, 2), options)
        stop_replicas()
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def client(front):
    """A client of the front, which knows some documents."""
    with served(front, front.state.front.options.limits) as server:
        headers = {"Authorization": f"Bearer {RED}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=120) as client:
            given = [{"id": d.id, "text": d.text} for d in DOCUMENTS]
            given += [{"id": name, "text": f"This is text {name}, and it was made for a test."} for name in MADE]
            client.post("/v1/documents", json={"documents": given}).raise_for_status()
            yield client


def ask(client, documents, **fields):
    body = {"model": "tiny", "messages": QUESTION, "documents": documents, "max_tokens": 8, "temperature": 0}
    response = client.post("/v1/chat/completions", json=body | fields)
    assert response.status_code == 200, response.text
    return response


def text(response):
    return response.json()["choices"][0]["message"]["content"]


def replica(response):
    return response.headers["x-kvboost-replica"]


def kill(name):
    ray.kill(ray.get_actor(f"SERVE_REPLICA::kvboost#Replica#{name}", namespace="serve"))


def figures(client, name):
    """A figure of each replica, summed over its labels."""
    page = client.get("/metrics", headers={"Authorization": f"Bearer {OPERATOR}"})
    assert page.status_code == 200, page.text
    found = Counter()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["replica"]] += sample.value
    return found


def replicas(client):
    return {replica(ask(client, [name], max_tokens=1)) for name in MADE}


def test_an_answer_is_the_engines(client):
    chosen = ["rain", "zebra"]
    with own_engine("red") as engine:
        expected = engine.generate(QUESTION, documents=chosen, max_tokens=8, temperature=0).text
    assert text(ask(client, chosen)) == expected
    assert ask(client, chosen).json()["kvboost"]["reused_share"] > 0.5
    streamed = ask(client, chosen, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_what_is_refused_has_the_servers_own_words(client):
    body = {"model": "tiny", "messages": QUESTION}
    assert client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer no"}).status_code == 401
    unknown = client.post("/v1/chat/completions", json=body | {"documents": ["nothing"]})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "document_not_found")
    assert client.post("/v1/chat/completions", json=body | {"model": "other"}).status_code == 404


def test_documents_have_a_home_and_both_replicas_are_used(client):
    both = sorted(replicas(client))
    assert len(both) == 2
    chosen = [[name, other] for name, other in zip(MADE, MADE[3:] + MADE[:3], strict=True)]
    sizes = {name: float(len(client.get(f"/v1/documents/{name}").json()["text"])) for name in MADE}
    homes = [rank_replicas({name: sizes[name] for name in names}, both)[0] for names in chosen]
    assert len(set(homes)) == 2
    asked = [replica(ask(client, names, max_tokens=1)) for _ in range(3) for names in chosen]
    # A replica that is slow to say how much it has to do may be passed over.
    assert sum(given == home for given, home in zip(asked, homes * 3, strict=True)) >= 0.9 * len(asked)


def test_a_deleted_document_is_gone_everywhere(client):
    client.post("/v1/documents", json={"id": "short", "text": "It is short."}).raise_for_status()
    ask(client, ["short"])
    assert client.delete("/v1/documents/short").json()["deleted"]
    assert client.get("/v1/documents/short").status_code == 404
    assert "short" not in [d["id"] for d in client.get("/v1/documents").json()["data"]]


def test_options_show_no_password_and_their_version_knows_every_field():
    def made(store, **others):
        return ReplicaOptions("m", "tiny", KEYS, engine=OPTIONS | {"store": store}, **others)

    one, other = f"redis://:{PASSWORD}@host", "redis://:another@host"
    for store in (one, RedisTier(one)):
        assert PASSWORD not in repr(made(store))
    assert made(one).version == made(one).version
    assert made(RedisTier(one)).version == made(RedisTier(one)).version
    versions = {
        made(one).version, made(other).version, made(RedisTier(one)).version, made(RedisTier(other)).version,
        made(RedisTier(one, ttl_seconds=5)).version, made(one, limits=Limits(max_queue=1)).version,
    }  # fmt: skip
    assert len(versions) == 6


def test_more_than_ray_has_is_refused_and_not_waited_for(front, options):
    assert are_running()
    check_room(options, 2)
    for resources, message in (({"num_cpus": 2}, "2 replicas need 4 CPUs together"), ({"num_gpus": 1}, "need 2 GPUs")):
        with pytest.raises(ValueError, match=message):
            check_room(replace(options, resources=resources), 2)


def test_a_port_is_listened_at_when_the_replicas_are_ready_and_not_before(options, monkeypatch):
    """How long Ray takes to start does not matter here, so nothing is started."""

    def start(*arguments):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", place.port))

    def announce(address):
        socket.create_connection(("127.0.0.1", place.port)).close()
        assert address == place.url
        raise KeyboardInterrupt

    for name in ("check_room", "stop_replicas"):
        monkeypatch.setattr(serving, name, lambda *arguments: None)
    monkeypatch.setattr(serving, "_ray", lambda address: nullcontext())
    monkeypatch.setattr(serving, "start_replicas", start)
    with taken_place("127.0.0.1", 0) as place, pytest.raises(KeyboardInterrupt):
        serve_replicas(options, 1, place, announce=announce, log_level="warning")


@pytest.mark.parametrize(("given", "message"), [
    ({"engine": {"repair": "nonsense"}}, "unknown repair 'nonsense'; known are auto"),
    ({"engine": {"secret": b"short", "cache_dir": "kv"}}, "the secret has 5 bytes"),
    ({"engine": {"secret": b"of enough letters"}}, "read_only and secret are about cache_dir or store"),
    ({"engine": {"store": "http://host"}}, "store is no URL of a Redis server"),
    ({"engine": {"cache_dir": "file/kv"}}, "cache folder file/kv can not be used"),
    ({"engine": {"trusted_only": True, "cache_dir": "kv"}}, "trusted_only needs a secret"),
    ({"model": "nobody/nothing"}, "'nobody/nothing' is not a folder"),
    ({"model": "file"}, "file is a file but not a GGUF file"),
])  # fmt: skip
def test_what_a_replica_would_refuse_is_refused_before_ray_is_started(options, given, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("It is no folder.")
    with taken_place("127.0.0.1", 0) as place, pytest.raises(ValueError, match=message):
        serve_replicas(replace(options, **given), 1, place, announce=pytest.fail, log_level="warning")


def test_no_replicas_are_refused_before_ray_is_started(options, monkeypatch):
    monkeypatch.setattr(serving, "_start_ray", lambda address: pytest.fail("Ray is started"))
    with taken_place("127.0.0.1", 0) as place, pytest.raises(ValueError, match="there would be 0 replicas"):
        serve_replicas(options, 0, place, announce=pytest.fail, log_level="warning")


def test_the_reason_is_found_in_a_stack_trace_of_ray():
    trace = (
        "The deployment failed to start 3 times in a row. See controller logs for details. Error:\n"
        "\x1b[36mray::ServeReplica:kvboost:Replica.initialize_and_get_metadata()\x1b[39m (pid=7)\n"
        '  File "replica.py", line 1, in initialize\n    raise RuntimeError(traceback.format_exc()) from None\n'
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "engine.py", line 2, in __init__\n    check(name)\nValueError: unknown repair \'nonsense\'\n\n'
    )
    assert reason_of(trace) == "ValueError: unknown repair 'nonsense'"
    assert reason_of("It went wrong.\nNobody knows why.\n") == "Nobody knows why."
    assert reason_of("") == ""


@pytest.fixture
def no_ray(monkeypatch):
    """Ray is neither started nor stopped; yields what is done in the place of ``ray.init``."""
    done = []

    def init(**options):
        # As Ray's own does.
        signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(15))
        for step in done:
            step()

    monkeypatch.setattr(serving, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    monkeypatch.setattr(serving, "serve", SimpleNamespace(shutdown=lambda: None))
    return done


@pytest.mark.parametrize("is_within_init", [True, False])
def test_sigterm_during_the_start_ends_it_as_ctrl_c_does(no_ray, is_within_init):
    before = signal.getsignal(signal.SIGTERM)
    if is_within_init:
        no_ray.append(lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt), serving._ray(None):
        assert not is_within_init
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_ray_that_does_not_start_is_told_with_the_remedy(no_ray):
    def fail():
        raise ConnectionError("Nobody is there.\nA long story.")

    no_ray.append(fail)
    for address, message in (
        (None, r"^Ray does not start on this machine \(Nobody is there\); see that"),
        ("host:1", r"^Ray does not answer at host:1 \(Nobody is there\); give the --ray-address"),
    ):
        with pytest.raises(ReplicasError, match=message), serving._ray(address):
            pytest.fail("it went on")


def test_what_a_replica_logs_comes_out_with_its_name(monkeypatch):
    package, out = logging.getLogger("kvboost_rag"), io.StringIO()
    monkeypatch.setattr(package, "handlers", [])
    monkeypatch.setattr(package, "level", logging.NOTSET)
    monkeypatch.setattr(sys, "__stderr__", out)
    log_to_stderr("r1", logging.WARNING)
    logging.getLogger("kvboost_rag.store").info("It is quiet.")
    logging.getLogger("kvboost_rag.store").warning("The disk is full.")
    assert out.getvalue() == "r1 kvboost_rag.store: The disk is full.\n"


def test_who_failed_is_logged_in_the_front_and_why_in_the_replica(caplog):
    app = FastAPI()

    @app.get("/fails")
    async def fails():
        raise ArithmeticError("It went wrong.")

    async def front(scope, receive, send):
        async def named(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-kvboost-replica", b"r1")]
            await send(message)

        await logging_failures(app)(scope, receive, named)

    async def ask():
        transport = httpx.ASGITransport(TellFailures(front), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return [(await client.get(path)).status_code for path in ("/fails", "/nothing")]

    assert asyncio.run(ask()) == [500, 404]
    assert [record.getMessage() for record in caplog.records if record.name == "kvboost_rag.replicas"] == [
        "replica r1 failed at GET /fails", "a request has failed: GET /fails",
    ]  # fmt: skip
    assert "ArithmeticError: It went wrong." in caplog.text


def is_gone(client, name):
    response = client.delete(f"/v1/documents/{name}")
    return (response.status_code, response.json()["error"]["code"]) == (404, "document_not_found")


def test_a_refused_chat_leaves_no_document(client):
    brought = {"id": "brought", "text": "It came with a chat that was refused."}
    body = {"model": "tiny", "messages": QUESTION, "documents": [brought], "max_tokens": 4096}
    assert client.post("/v1/chat/completions", json=body).json()["error"]["code"] == "context_length_exceeded"
    assert client.get("/v1/documents/brought").status_code == 404
    assert is_gone(client, "brought")


def test_what_a_replica_alone_knows_can_be_deleted(client, front):
    assert client.post("/v1/documents", json={"id": "left", "text": "Its front was stopped."}).status_code == 200
    front.state.front.catalogue.remove("red", "left")
    assert client.get("/v1/documents/left").status_code == 404
    assert client.delete("/v1/documents/left").json()["deleted"]
    assert is_gone(client, "left")


class Odd(NewDocument):
    """A document from which a replica can make none, which nothing that a client sends is."""

    def model_dump(self, **options):
        return super().model_dump(**options) | {"odd": True}


def test_what_a_replica_raises_is_told_as_the_server_tells_it(client, front, caplog):
    catalogue = front.state.front.catalogue
    catalogue.add("red", NewDocument(id="long", text="word " * 5000))
    catalogue.add("red", Odd(id="odd", text="It is odd."))
    codes = {"long": (400, "context_length_exceeded"), "odd": (500, "server_error")}
    for name, expected in codes.items():
        for stream in (False, True):
            body = {"model": "tiny", "messages": QUESTION, "documents": [name], "stream": stream}
            response = client.post("/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == expected
            assert "Traceback" not in response.text
            assert "Ray" not in response.text
        client.delete(f"/v1/documents/{name}")
    assert "TypeError" in caplog.text


def test_figures_of_all_replicas_are_on_one_page(client):
    both = replicas(client)
    assert set(figures(client, "kvboost_documents")) == both
    before = figures(client, "kvboost_ttft_seconds_count")
    answered = replica(ask(client, ["rain"]))
    after = figures(client, "kvboost_ttft_seconds_count")
    assert after - before == {answered: 1}
    assert client.get("/metrics").status_code == 403


def test_what_one_replica_has_encoded_another_one_serves_without_a_forward(client, store):
    if store is None:
        pytest.skip("the server is missing: apt-get install redis-server")
    both = sorted(replicas(client))
    names = [f"shared-{i}" for i in range(6)]
    texts = {name: f"This is {name}, and one replica encodes it. Who reads it? Another one." for name in names}
    homes = {
        name: client.post("/v1/documents", json={"id": name, "text": text}).headers["x-kvboost-replica"]
        for name, text in texts.items()
    }  # fmt: skip
    short = names[0]
    other = next(name for name in both if name != homes[short])
    # Most of the prompt is at home at the other replica, which has not seen the short one.
    rest = [name for name in MADE if rank_replicas({name: 1}, both)[0] == other][:4]
    eventually(lambda: figures(client, "kvboost_active_requests").total() == 0)
    before = figures(client, "kvboost_shared_chunks_total")[other]
    answer = ask(client, [short, *rest])
    assert replica(answer) == other
    assert figures(client, "kvboost_shared_chunks_total")[other] > before
    assert answer.json()["kvboost"]["reused_share"] > 0.5


def test_a_client_that_leaves_stops_its_replica(client):
    full = ask(client, ["rain"], max_tokens=LONG).json()["usage"]["completion_tokens"]
    before = figures(client, "kvboost_completion_tokens_total").total()
    body = {"model": "tiny", "messages": QUESTION, "documents": ["rain"], "max_tokens": LONG, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert next(response.iter_lines())
    eventually(lambda: figures(client, "kvboost_active_requests").total() == 0)
    assert figures(client, "kvboost_completion_tokens_total").total() - before < full


def test_who_asks_nothing_is_left(front, options):
    impatient = replace(options.limits, receive_timeout=0.8)
    with served(front, impatient) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
            assert silent.recv(10) == b""


def test_too_many_requests_are_refused_and_the_others_answered(client):
    expected = text(ask(client, ["rain"], max_tokens=48))
    body = {"model": "tiny", "messages": QUESTION, "documents": ["rain"], "max_tokens": 48, "temperature": 0}
    with ThreadPoolExecutor(48) as pool:
        given = list(pool.map(lambda _: client.post("/v1/chat/completions", json=body), range(48)))
    answers, refused = ([r for r in given if r.status_code == code] for code in (200, 429))
    assert len(answers) + len(refused) == 48
    assert answers
    assert refused
    assert {text(answer) for answer in answers} == {expected}
    assert all(int(r.headers["retry-after"]) >= 1 and r.json()["error"]["code"] == "overloaded" for r in refused)


def test_a_replica_killed_amid_a_stream_cuts_that_one_and_harms_no_other_request(client):
    names = [f"late-{i}" for i in range(12)]
    batch = {"documents": [{"id": name, "text": f"It was added late, as {name}."} for name in names]}
    expected = text(ask(client, ["zebra"], max_tokens=LONG))
    body = {"model": "tiny", "messages": QUESTION, "documents": ["zebra"], "max_tokens": LONG, "temperature": 0}
    with (
        ThreadPoolExecutor(2) as pool, client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as r,
    ):  # fmt: skip
        lines = (line.removeprefix("data: ") for line in r.iter_lines() if line)
        events = [next(lines), next(lines)]
        asking = pool.submit(ask, client, ["zebra"], max_tokens=LONG)
        # What is refused for want of room before a replica has taken it is another matter.
        eventually(lambda: figures(client, "kvboost_active_requests").total() == 2)
        adding = pool.submit(client.post, "/v1/documents", json=batch)
        kill(r.headers["x-kvboost-replica"])
        events += lines
    *events, last = [json.loads(event) for event in events if event != "[DONE]"]
    assert last["error"]["code"] == "replica_lost"
    so_far = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert expected.startswith(so_far)
    assert len(so_far) < len(expected)
    assert text(asking.result(240)) == expected
    # The one that is left may have too much to do for all of them at once.
    assert adding.result(120).status_code in (200, 429)
    eventually(lambda: client.post("/v1/documents", json=batch).status_code == 200, 120)
    assert ask(client, names[:3]).json()["kvboost"]["reused_share"] > 0.3
    eventually(lambda: len(replicas(client) - {r.headers["x-kvboost-replica"]}) == 2, 240)


def test_a_killed_replica_loses_no_request(client):
    expected = text(ask(client, ["music", "zebra"], max_tokens=48))
    victim = replica(ask(client, ["music", "zebra"]))
    done = Counter()

    def keep_asking(_):
        response = ask(client, ["music", "zebra"], max_tokens=48)
        done[replica(response)] += 1
        return text(response)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(keep_asking, i) for i in range(24)]
        eventually(lambda: done[victim] > 0, 60)
        kill(victim)
        assert [answer.result(120) for answer in answers] == [expected] * 24
    assert done[victim] < 24
    eventually(lambda: len(replicas(client) - {victim}) == 2, 240)


def test_answers_go_on_while_replicas_come_and_go(client, options):
    expected = text(ask(client, ["rain"]))
    before = replicas(client)
    stop = threading.Event()

    def keep_asking():
        answers = []
        while not stop.is_set():
            answers.append(text(ask(client, ["rain"])))
            time.sleep(0.05)
        return answers

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            for count in (1, 2):
                start_replicas(options, count)
                eventually(lambda count=count: len(replicas(client)) == count, 240)
                # One that stays is the same process, which holds its documents' KV.
                assert before & replicas(client)
        finally:
            stop.set()
        assert set(asking.result(120)) == {expected}


# What passes between the front and its replicas, at a moment of the test's choice: all in this process, without Ray.
