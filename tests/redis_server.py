"""A real Redis server in a folder of its own, and a slow way to it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_chunks import DTYPE, IDENTITY, SHAPE

from kvboost_rag.store import RedisStore, RedisTier

redis = pytest.importorskip("redis", reason="the client is missing: pip install 'kvboost-rag[redis]'")
from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402

if shutil.which("redis-server") is None:
    pytest.skip("the server is missing: apt-get install redis-server", allow_module_level=True)

# Slow enough that no read of a test is given up because the machine is busy.
PATIENT = 1.0


class Server:
    """A server behind a Unix socket, and on a TCP port of its own; nothing is written to disk."""

    def __init__(self, *options: str) -> None:
        # Not pytest's folder: the path of a socket may have about a hundred characters.
        self.folder = Path(tempfile.mkdtemp(prefix="kvb"))
        self.socket = self.folder / "socket"
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
            "--save", "", "--appendonly", "no", "--dir", str(self.folder), *self._options,
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(1000):
            with contextlib.suppress(redis.ConnectionError), self.client() as client:
                # A server that wants a password is up, too.
                with contextlib.suppress(redis.AuthenticationError):
                    client.ping()
                return
            time.sleep(0.01)
        raise AssertionError((self.folder / "log").read_text())

    def client(self, **options) -> redis.Redis:
        # The client's own retries would wait for seconds.
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), **options)

    def kill(self) -> None:
        """End it as a lost machine does."""
        self._process.kill()
        self._process.wait(30)
        self.socket.unlink(missing_ok=True)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)

    def keys(self) -> list[str]:
        with self.client() as client:
            return sorted(key.decode() for key in client.scan_iter(count=1000))

    def empty(self) -> None:
        with self.client() as client:
            for key in self.keys():
                client.delete(key)

    def configure(self, **options: object) -> None:
        with self.client() as client:
            for name, value in options.items():
                client.config_set(name.replace("_", "-"), value)


@contextlib.contextmanager
def running(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def opened(url: str, identity: str = IDENTITY, **options) -> Iterator[RedisStore]:
    """Open a store over a server; ``prefill_rate`` and the store's own options by name."""
    tier = RedisTier(url, ttl_seconds=options.pop("ttl_seconds", 600))
    rate = options.pop("prefill_rate", PATIENT)
    store = RedisStore(tier, identity, SHAPE, DTYPE, prefill_rate=rate, **options)
    try:
        yield store
    finally:
        store.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class _Link:
    """One connection's way."""

    def __init__(self) -> None:
        self.tail = b""
        self.holds = self.loses = self.is_gone = False


class SlowWay:
    """A TCP port that leads to another one; what comes back comes in drops, ``pause`` seconds apart.

    The answer to a command that contains ``hold`` is kept back until that is empty again, or the client is gone. The
    answers to the next ``losses`` commands that contain ``lose`` are lost, and their connections with them.
    """

    def __init__(self, port: int) -> None:
        self.pause = 0.0
        self.drop_bytes = 1 << 16
        self.passed = 0
        self.asked = 0
        self.hold = self.lose = b""
        self.losses = 0
        self.held = 0
        self._target = port
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            if self._ended.is_set():
                near.close()
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            link = _Link()
            for work in (self._ask, self._answer):
                thread = threading.Thread(target=work, args=(near, far, link))
                self._threads.append(thread)
                thread.start()

    def _ask(self, near: socket.socket, far: socket.socket, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                self.asked += len(data)
                self._look(link.tail + data, link)
                link.tail = data[-16:]
                far.sendall(data)
        link.is_gone = True
        # Whoever asked is gone, so no answer is waited for either.
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _look(self, data: bytes, link: _Link) -> None:
        if self.hold and self.hold in data:
            link.holds = True
        if self.losses and self.lose in data:
            self.losses -= 1
            link.loses = True

    def _wait(self, link: _Link) -> bool:
        """Wait as long as the answer is kept back; return whether it may pass."""
        self.held += link.holds
        while link.holds and self.hold and not link.is_gone and not self._ended.wait(0.01):
            pass
        self.held -= link.holds
        link.holds = False
        return not link.is_gone and not link.loses

    def _answer(self, near: socket.socket, far: socket.socket, link: _Link) -> None:
        with contextlib.suppress(OSError), near, far:
            while data := far.recv(self.drop_bytes):
                if not self._wait(link) or self._ended.wait(self.pause):
                    return
                near.sendall(data)
                self.passed += len(data)

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            # Wakes the thread that accepts.
            pass
        self._listening.close()
        for thread in self._threads:
            thread.join(30)
