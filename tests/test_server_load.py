"""The server when there is much to do, when clients leave, and when it has to stop."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

import httpx  # noqa: E402
from live_server import BLUE, KEYS, RED, added, eventually, live_server, opened  # noqa: E402
from tiny import tiny_model, tiny_tokenizer  # noqa: E402

from kvboost_rag.server import Keys, Limits  # noqa: E402
from kvboost_rag.server.admission import Admission  # noqa: E402

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"
SHORT = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0, "max_tokens": 4}
# As much as the window holds: longer than any test waits for it.
LONG = SHORT | {"max_tokens": 940, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow():
    with live_server(limits=Limits(max_concurrent=1, max_queue=1)) as running:
        added(running)
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, LONG),
        (CHAT, LONG | {"stream": True}),
        ("/v1/completions", {"model": "tiny", "prompt": "Why?", "max_tokens": 940, "ignore_eos": True}),
    ],
)
def test_a_closed_connection_stops_the_compute_and_frees_the_place(narrow, path, body, caplog):
    caplog.set_level("INFO", "kvboost_rag")
    engine = narrow.service.engines[""]
    requests = engine.stats.requests
    connection = opened(narrow, path, body)
    if "stream" in body:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    eventually(lambda: engine.stats.requests > requests)
    connection.close()
    eventually(narrow.idle)
    assert narrow.service.threads.borrowed_tokens == 0
    # The engine logs the report of an answer that came to its end.
    assert "prompt tokens" not in caplog.text
    with narrow.client() as client:
        assert client.post(CHAT, json=SHORT).status_code == 200
    assert "prompt tokens" in caplog.text


def test_too_many_requests_are_told_when_to_come_again(narrow):
    admission = narrow.service.admission
    running = opened(narrow, CHAT, LONG | {"stream": True})
    assert running.recv(20).startswith(b"HTTP/1.1 200")
    waiting = opened(narrow, CHAT, SHORT | {"stream": True})
    eventually(lambda: admission.waiting == 1)
    with narrow.client() as client:
        refused = client.post(CHAT, json=SHORT)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert client.post("/v1/documents", json={"id": "x", "text": "One more."}).status_code == 429
        assert client.get("/health").status_code == client.get("/v1/documents").status_code == 200
        metrics = client.get("/metrics").text
        assert "kvboost_queue_length 1.0" in metrics and "kvboost_active_requests 1.0" in metrics
    running.close()
    # The one that waited has its turn.
    assert waiting.recv(20).startswith(b"HTTP/1.1 200")
    waiting.close()
    eventually(narrow.idle)


def test_a_burst_is_refused_in_part_and_answered_in_the_end():
    """Clients that come again when they are told to are all served."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    asked = SHORT | {"max_tokens": 10, "extra_body": {"ignore_eos": True}}
    with live_server(limits=Limits(max_concurrent=1, max_queue=2)) as live, ThreadPoolExecutor(5) as pool:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=30) as client:
            answers = [pool.submit(client.chat.completions.create, **asked) for _ in range(5)]
            assert len({answer.result(120).choices[0].message.content for answer in answers}) == 1
        refused = re.search(r'completions",status="429"} (\d+)', live.service.metrics.text().decode())
        assert int(refused[1]) >= 2
        assert live.idle()


def test_openais_client_may_leave_in_the_middle_of_a_stream(narrow, caplog):
    openai = pytest.importorskip("openai", reason="pip install openai")
    caplog.set_level("INFO", "kvboost_rag")
    asked = SHORT | {"max_tokens": 940, "stream": True, "extra_body": {"ignore_eos": True}}

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
            async with await client.chat.completions.create(**asked) as stream:
                await anext(aiter(stream))

    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.create(**asked) as stream:
            next(iter(stream))
        eventually(narrow.idle)
        asyncio.run(leave())
        eventually(narrow.idle)
        assert "prompt tokens" not in caplog.text


@pytest.fixture
def shared():
    limits = Limits(max_concurrent=1, max_queue=4)
    with live_server(KEYS, limits) as running:
        yield running


def test_one_key_does_not_fill_the_queue_for_others(shared):
    admission = shared.service.admission
    running = opened(shared, CHAT, LONG | {"stream": True}, RED)
    assert running.recv(20).startswith(b"HTTP/1.1 200")
    waiting = [opened(shared, CHAT, SHORT, RED) for _ in range(2)]
    eventually(lambda: admission.waiting == 2)
    with shared.client(RED) as red, shared.client(BLUE) as blue, ThreadPoolExecutor(1) as pool:
        refused = red.post(CHAT, json=SHORT)
        assert refused.status_code == 429 and "this key" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        answer = pool.submit(blue.post, CHAT, json=SHORT)
        eventually(lambda: admission.waiting == 3)
        running.close()
        assert answer.result(60).status_code == 200
        assert red.post(CHAT, json=SHORT).status_code == 200
    for connection in waiting:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        connection.close()


def test_namespaces_take_turns_in_the_queue(shared):
    admission, order = shared.service.admission, []
    running = opened(shared, CHAT, LONG | {"stream": True}, RED)
    assert running.recv(20).startswith(b"HTTP/1.1 200")

    def ask(client: httpx.Client, name: str) -> None:
        assert client.post(CHAT, json=SHORT).status_code == 200
        order.append(name)

    with shared.client(RED) as red, shared.client(BLUE) as blue, ThreadPoolExecutor(4) as pool:
        asked = []
        for client, name in ((red, "red 1"), (red, "red 2"), (blue, "blue 1"), (blue, "blue 2")):
            asked.append(pool.submit(ask, client, name))
            eventually(lambda: admission.waiting == len(asked))
        running.close()
        for one in asked:
            one.result(60)
    assert order == ["red 1", "blue 1", "red 2", "blue 2"]


def test_a_place_that_is_handed_to_one_who_leaves_goes_to_the_next():
    async def scene() -> None:
        admission = Admission(Limits(max_concurrent=1))

        async def work() -> None:
            async with admission.place():
                pass

        async with admission.place():
            first, second = asyncio.create_task(work()), asyncio.create_task(work())
            await asyncio.sleep(0)
            assert (admission.active, admission.waiting) == (1, 2)
        # It has the place already, and does not know it yet.
        first.cancel()
        await asyncio.wait({first, second}, timeout=10)
        assert first.cancelled() and second.done()
        assert admission.busy == 0

    asyncio.run(scene())


def test_who_leaves_the_queue_is_forgotten(narrow):
    requests = narrow.service.engines[""].stats.requests
    running = opened(narrow, CHAT, LONG | {"stream": True})
    assert running.recv(20).startswith(b"HTTP/1.1 200")
    waiting = opened(narrow, CHAT, SHORT)
    eventually(lambda: narrow.service.admission.waiting == 1)
    waiting.close()
    eventually(lambda: narrow.service.admission.waiting == 0)
    running.close()
    eventually(narrow.idle)
    assert narrow.service.engines[""].stats.requests == requests + 1


def test_adding_documents_stops_when_the_connection_is_closed(narrow):
    engine = narrow.service.engines[""]
    known = engine.stats.documents
    documents = [{"id": f"many-{i}", "text": f"{i} " + "A long text of many words. " * 30} for i in range(400)]
    connection = opened(narrow, "/v1/documents", {"documents": documents, "stream": True})
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(narrow.idle)
    assert known < engine.stats.documents < known + 400
    engine.remove_documents([d.id for d in engine.documents if d.id.startswith("many-")])


def test_an_answer_may_take_no_longer_than_the_timeout(narrow):
    with live_server(limits=Limits(timeout=0.2)) as live, live.client() as client:
        late = client.post(CHAT, json=LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        with client.stream("POST", CHAT, json=LONG | {"stream": True}) as streamed:
            events = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
        assert json.loads(events[-1])["error"]["code"] == "timeout" and "[DONE]" not in events


def test_a_drain_has_its_limit():
    with live_server(limits=Limits(drain=0.3), keys=Keys.parse(f"red:{RED}")) as live:
        engine = live.service.engines["red"]
        with live.client(RED) as client, client.stream("POST", CHAT, json=LONG | {"stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            live.server.drain()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-1])["error"]["code"] == "stopping"
        live.thread.join(60)
        assert not live.thread.is_alive()
    with pytest.raises(Exception, match="closed"):
        engine.generate("Why?")


# A server of its own, as a person starts it --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    command = [sys.executable, "-m", "kvboost_rag.cli", "serve", "--model", str(folder), "--port", "0"]
    (folder.parent / "lines.jsonl").write_text('{"id": "zebra", "text": "A zebra ran home."}\n')
    # A gigabyte of earlier prompts would come to be kept, which is no leak.
    command += ["--drain", "300", "--documents", str(folder.parent / "lines.jsonl"), "--max-prefix-bytes", "1MiB"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(scope="module")
def told(process) -> tuple[str, str]:
    """Give the two lines that it prints: address and curl."""
    first, curl = process.stdout.readline(), process.stdout.readline()
    return re.search(r"http://127\.0\.0\.1:\d+", first)[0], curl


def test_documents_of_the_command_line_are_known(told):
    assert httpx.get(told[0] + "/v1/documents/zebra").json()["text"] == "A zebra ran home."


def test_the_printed_curl_line_works(told):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run([*shlex.split(told[1]), "--silent"], capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


HEAPS = """
import ctypes, threading
from kvboost_rag.server.heap import share_one_heap
{first}
libc, together = ctypes.CDLL(None), threading.Barrier(4)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
@pytest.mark.parametrize(("first", "is_one"), [("", False), ("assert share_one_heap()", True)])
def test_all_threads_share_one_heap(first, is_one):
    command = [sys.executable, "-c", HEAPS.format(first=first)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert (told.count("<heap nr=") == 1) is is_one


def test_under_load_nothing_fails_and_memory_stays(told, process, capsys):
    load_test = runpy.run_path(str(ROOT / "examples" / "load_test.py"))
    arguments = ["--url", told[0], "--pid", str(process.pid), "--seconds", "20", "--clients", "4"]
    assert load_test["main"]([*arguments, "--document-characters", "120", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert int(re.search(r"(\d+) requests, 0 errors", out)[1]) > 20
    assert int(re.search(r"(\d+) broken off by the client", out)[1]) > 0
    assert len(re.findall(r"p50 +\d+ ms +p95 +\d+ ms", out)) == 2
    if sys.platform == "linux":
        begin, end = map(float, re.search(r"([0-9.]+) MiB at the start, ([0-9.]+) MiB at the end", out).groups())
        assert end < begin + 64
        assert re.search(r"earlier prompts in it: [0-9.]+ MiB at the start, 0\.[0-9] MiB at the end", out)


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(told, process):
    """The last test of this process."""
    with httpx.Client(base_url=told[0], timeout=120) as client:
        with client.stream("POST", CHAT, json=LONG | {"max_tokens": 250, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            refused: list[httpx.Response] = []

            def ask() -> bool:
                refused.append(httpx.post(told[0] + CHAT, json=SHORT, timeout=120))
                return refused[-1].status_code == 503

            eventually(ask)
            assert refused[-1].json()["error"]["code"] == "stopping" and "retry-after" in refused[-1].headers
            assert httpx.get(told[0] + "/health").status_code == 503
            rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0


def test_threads_are_not_left_behind():
    before = set(threading.enumerate())
    with live_server() as live, live.client() as client:
        client.post(CHAT, json=SHORT).raise_for_status()
    eventually(lambda: not {t for t in set(threading.enumerate()) - before if t.is_alive()})
