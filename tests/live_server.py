"""A real server over a tiny model, in a thread, for the tests of the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.server import DrainingServer, Engines, Keys, Limits, Service, make_server

ZEBRA = "The zebra ran over the plain. It was fast and striped, and it saw a lion.\n\nThen it ran home."
MUSIC = "A fugue begins with one voice alone. Others join, one by one, each with the same theme."
RAIN = "Rain falls. Rivers rise! Who knows why the sea is never full, though all rivers run to it?"
DOCUMENTS = [Document("zebra", ZEBRA), Document("music", MUSIC), Document("rain", RAIN)]
RED, BLUE, OPERATOR = "red-key-0123456789", "blue-key-0123456789", "operator-key-0123456789"
KEYS = Keys.parse(f"red:{RED}\nblue:{BLUE}\n*:{OPERATOR}")
# Earlier prompts would make an answer depend on what was asked before, in its last bits.
OPTIONS = {"chunker": AdaptiveChunker(target=24), "max_prefix_bytes": 0, "repair": "selective:4"}


@dataclass(frozen=True)
class Live:
    url: str
    service: Service
    server: DrainingServer
    thread: threading.Thread

    @property
    def port(self) -> int:
        return self.server.port

    def client(self, key: str | None = None, **options) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def idle(self) -> bool:
        return self.service.admission.busy == 0


def eventually(true, seconds: float = 30.0) -> None:
    """Wait until something holds, and fail if it does not."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def opened(live: Live, path: str, body: dict, key: str | None = None, buffer: int | None = None) -> socket.socket:
    """Send a request and leave the answer where it is, in a buffer of so many bytes."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", live.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@contextmanager
def live_server(
    keys: Keys | None = None, limits: Limits | None = None, model=None, tokenizer=None, name: str = "tiny", **options
) -> Iterator[Live]:
    keys = keys or Keys()
    model, tokenizer = model or tiny_model("llama"), tokenizer or tiny_tokenizer()
    service = Service(Engines(model, tokenizer, name, keys.namespaces, OPTIONS | options), keys, limits or Limits())
    server = make_server(service, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Live(f"http://127.0.0.1:{server.port}", service, server, thread)
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def own_engine(namespace: str = "", **options) -> Iterator[KVBoostEngine]:
    """An engine beside the server's, with the same documents: what the server has to answer."""
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), namespace=namespace, **OPTIONS | options) as engine:
        engine.add_documents(DOCUMENTS)
        yield engine


def added(live: Live, key: str | None = None) -> None:
    body = {"documents": [{"id": d.id, "text": d.text} for d in DOCUMENTS]}
    with live.client(key) as client:
        client.post("/v1/documents", json=body).raise_for_status()
