"""Replicas and their front in one process, for tests of what passes between them; Ray is not started."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, contextmanager
from types import SimpleNamespace

import httpx
import uvicorn
from live_server import KEYS, OPTIONS, RED, eventually
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag.replicas import ReplicaOptions, create_front, replica
from kvboost_rag.replicas.replica import Replica
from kvboost_rag.replicas.serving import FrontServer
from kvboost_rag.server import Limits


class LocalReplicas:
    """Stands in for Ray's handle.

    Attributes
    ----------
    replicas
        By name.
    chosen
        Name of the one that gets the next request.
    front
        The application in front of them.
    on_the_way, begun
        Awaited before it gets a request, and when its response has begun; once, because it may ask something itself.
    """

    def __init__(self, options, monkeypatch, heap, names=("one", "two")):
        monkeypatch.setattr(replica, "_device", lambda: None)
        # It lasts for the process, which is that of all tests.
        monkeypatch.setattr(replica, "share_one_heap", heap)
        self.replicas = {name: self._made(name, options, monkeypatch) for name in names}
        self.chosen = names[0]
        self.front = self.on_the_way = self.begun = None
        self.answer = SimpleNamespace(remote=lambda *given, **named: Answer(self._answer(*given, **named)))

    def _made(self, name, options, monkeypatch):
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))
        monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
        return Replica(options)

    def engine(self, name, namespace="red"):
        return self.replicas[name]._engines[namespace]

    async def _answer(self, *given, **named):
        chosen = self.replicas[self.chosen]
        await self._once("on_the_way")
        async with aclosing(chosen.answer(*given, **named)) as items:
            async for item in items:
                if isinstance(item, dict):
                    await self._once("begun")
                yield item

    async def _once(self, moment):
        wanted = getattr(self, moment)
        setattr(self, moment, None)
        if wanted is not None:
            await wanted()

    def broadcast(self, method, *arguments):
        async def results(return_exceptions):
            calls = [getattr(replica, method)(*arguments) for replica in self.replicas.values()]
            return await asyncio.gather(*calls, return_exceptions=return_exceptions)

        return SimpleNamespace(results_async=results)


class Answer:
    """What Ray's handle gives for a stream."""

    def __init__(self, items):
        self._items = items
        self._closing = None

    def __aiter__(self):
        return self._items

    def cancel(self):
        self._closing = asyncio.ensure_future(self._items.aclose())


def local_front(folder, monkeypatch, limits=None, heap=lambda: True, **engine):
    """Make two replicas of a saved model, their front, and a client of it that is used in one event loop."""
    options = ReplicaOptions(str(folder), "tiny", KEYS, limits or Limits(max_concurrent=4), OPTIONS | engine)
    local = LocalReplicas(options, monkeypatch, heap)
    local.front = create_front(local, options)
    transport = httpx.ASGITransport(local.front)
    headers = {"Authorization": f"Bearer {RED}"}
    return local, httpx.AsyncClient(transport=transport, base_url="http://front", headers=headers, timeout=60)


def saved_model(tmp_path_factory):
    """Save a tiny model; return its folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def served(app, limits):
    """Serve a front; yields the server."""
    config = uvicorn.Config(app, port=0, log_config=None, http="h11", ws="none")
    server = FrontServer(config, app.state.front.requests, limits)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
