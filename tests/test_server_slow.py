"""The server and clients that are slow, whether they mean it or not: none keeps a place, and none keeps memory."""

from __future__ import annotations

import json
import socket
import time

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

from live_server import BLUE, KEYS, RED, eventually, live_server, opened  # noqa: E402

from kvboost_rag.server import Limits  # noqa: E402

CHAT = "/v1/chat/completions"
# Every event names the model, so that a few of them fill all buffers on the way.
NAME = "tiny" * 32_000
SHORT = {"model": NAME, "messages": [{"role": "user", "content": "Why?"}], "temperature": 0, "max_tokens": 4}
LONG = SHORT | {"max_tokens": 940, "ignore_eos": True, "stream": True}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def live():
    limits = Limits(max_concurrent=1, send_timeout=0.5, receive_timeout=0.8, max_body_bytes=1 << 30)
    with live_server(KEYS, limits, name=NAME) as running:
        yield running


def connected(live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    out = b""
    try:
        while part := connection.recv(1 << 16):
            out += part
    except ConnectionError:
        out += b"(reset)"
    return out


def test_who_stops_reading_a_stream_keeps_no_place(live, caplog):
    caplog.set_level("INFO", "kvboost_rag")
    with opened(live, CHAT, LONG, RED, buffer=4096) as stuck:
        assert stuck.recv(20).startswith(b"HTTP/1.1 200")
        with live.client(BLUE) as blue:
            assert blue.post(CHAT, json=SHORT).status_code == 200
        eventually(lambda: "has read nothing for 0.5 seconds" in caplog.text)
        assert caplog.text.count("prompt tokens") == 1, "the answer was computed to its end"
        assert "kvboost_stuck_streams_total 1.0" in live.service.metrics.text().decode()
        eventually(lambda: not live.server.server_state.connections)
        assert b"[DONE]" not in read_all(stuck)
    assert live.idle() and live.service.threads.borrowed_tokens == 0


def test_a_slow_reader_gets_all_of_it(live):
    with opened(live, CHAT, LONG | {"max_tokens": 20}, RED, buffer=1 << 16) as slow:
        out = b""
        while b"[DONE]" not in out:
            time.sleep(0.02)
            out += slow.recv(1 << 16)
    assert out.count(b"data: ") > 15


def test_a_long_answer_may_be_read_slowly(live):
    """Longer than an idle connection lives."""
    given = {"id": "long", "text": "A text.", "metadata": {"much": "x" * 12_000_000}}
    with live.client(RED) as red:
        red.post("/v1/documents", json=given).raise_for_status()
    with connected(live) as slow:
        slow.sendall(f"GET /v1/documents/long HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {RED}\r\n\r\n".encode())
        out, begin = 0, time.monotonic()
        while part := slow.recv(1 << 18):
            out += len(part)
            time.sleep(0.04)
        assert out > 12_000_000 and time.monotonic() - begin > 1.0


def test_a_stranger_sends_no_body(live):
    """The refusal comes while the body is still missing."""
    with connected(live) as stranger:
        stranger.sendall(f"{HEAD}Authorization: Bearer {RED}x\r\nContent-Length: 500000000\r\n\r\n".encode())
        assert stranger.recv(4096).startswith(b"HTTP/1.1 401")


def test_a_stranger_is_not_even_asked_to_go_on(live):
    with connected(live) as stranger:
        stranger.sendall(f"{HEAD}Content-Length: 500000000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
    with connected(live) as known:
        known.sendall(
            f"{HEAD}Authorization: Bearer {RED}\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert known.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        known.sendall(b"{}")
        assert known.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_body_that_drips_is_broken_off(live):
    with connected(live) as slow:
        slow.sendall(f"{HEAD}Authorization: Bearer {RED}\r\nContent-Length: 100000\r\n\r\n".encode())
        answer = b""
        slow.settimeout(0.1)
        end = time.monotonic() + 30
        while not answer and time.monotonic() < end:
            slow.sendall(b" ")
            try:
                answer = slow.recv(4096)
            except TimeoutError:
                continue
        slow.settimeout(30)
        answer += read_all(slow)
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()
    error = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["error"]
    assert error["code"] == "request_too_slow" and "0.8 seconds" in error["message"]


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A"])
def test_a_connection_without_a_request_is_ended(live, sent):
    with connected(live) as idle:
        idle.sendall(sent)
        assert read_all(idle) in (b"", b"(reset)")


def test_headers_that_drip_are_broken_off_and_have_an_end(live, caplog):
    with connected(live) as slow, pytest.raises(ConnectionError):
        for _ in range(300):
            slow.sendall(b"G")
            time.sleep(0.1)
    assert "Invalid HTTP request" not in caplog.text
    with connected(live) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 9_000)
        read_all(endless)
    assert "Invalid HTTP request" in caplog.text


def test_a_client_that_asks_now_and_then_keeps_its_connection(live):
    with live.client(RED) as client:
        ports = set()
        for _ in range(12):
            with client.stream("GET", "/health") as response:
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                response.read()
            time.sleep(0.15)
    assert len(ports) == 1
