"""Replicas on Ray Serve: what one engine answers, at the replica that has the documents, whatever happens to others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

ray = pytest.importorskip("ray", reason="replicas need Ray Serve: pip install 'kvboost-rag[serve,ray]'")
pytest.importorskip("fastapi", reason="replicas need the server: pip install 'kvboost-rag[serve,ray]'")

import uvicorn  # noqa: E402
from live_server import DOCUMENTS, KEYS, OPTIONS, RED, eventually, own_engine  # noqa: E402
from ray import serve  # noqa: E402
from tiny import tiny_model, tiny_tokenizer  # noqa: E402

from kvboost_rag.affinity import rank_replicas  # noqa: E402
from kvboost_rag.replicas import ReplicaOptions, create_front, start_replicas, stop_replicas  # noqa: E402

QUESTION = [{"role": "user", "content": "What ran?"}]
MADE = [f"made-{i}" for i in range(12)]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return ReplicaOptions(str(folder), "tiny", KEYS, engine=OPTIONS, resources={"num_cpus": 0.1})


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def client(options, monkeypatch_module):
    """Two replicas and what stands in front of them."""
    # Ray gives its processes what others leave of the CPU, which may be nothing beside other tests.
    monkeypatch_module.setenv("RAY_worker_niceness", "0")
    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        front = create_front(start_replicas(options, 2), options)
        server = uvicorn.Server(uvicorn.Config(front, port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        headers = {"Authorization": f"Bearer {RED}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
            given = [{"id": d.id, "text": d.text} for d in DOCUMENTS]
            given += [{"id": name, "text": f"This is text {name}, and it was made for a test."} for name in MADE]
            client.post("/v1/documents", json={"documents": given}).raise_for_status()
            yield client
        server.should_exit = True
        thread.join(60)
        stop_replicas()
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(client, documents, **fields):
    body = {"model": "tiny", "messages": QUESTION, "documents": documents, "max_tokens": 8, "temperature": 0}
    response = client.post("/v1/chat/completions", json=body | fields)
    assert response.status_code == 200, response.text
    return response


def text(response):
    return response.json()["choices"][0]["message"]["content"]


def replica(response):
    return response.headers["x-kvboost-replica"]


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
        ray.kill(ray.get_actor(f"SERVE_REPLICA::kvboost#Replica#{victim}", namespace="serve"))
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
