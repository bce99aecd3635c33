"""Replicas and their front in one process and event loop, for tests of what passes between them; Ray is not started."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import httpx
from live_server import KEYS, OPTIONS, RED

from kvboost_rag.replicas import ReplicaOptions, create_front, replica
from kvboost_rag.replicas.replica import Replica
from kvboost_rag.server import Limits


class LocalReplicas:
    """Stands in for Ray's handle.

    Attributes
    ----------
    replicas
        By name.
    chosen
        Name of the one that gets the next request.
    on_the_way, begun
        Awaited before it gets a request, and when its response has begun; once, because it may ask something itself.
    """

    def __init__(self, options, monkeypatch, heap, names=("one", "two")):
        monkeypatch.setattr(replica, "_device", lambda: None)
        # It lasts for the process, which is that of all tests.
        monkeypatch.setattr(replica, "share_one_heap", heap)
        self.replicas = {name: self._made(name, options, monkeypatch) for name in names}
        self.chosen = names[0]
        self.on_the_way = self.begun = None
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
    transport = httpx.ASGITransport(create_front(local, options))
    headers = {"Authorization": f"Bearer {RED}"}
    return local, httpx.AsyncClient(transport=transport, base_url="http://front", headers=headers, timeout=60)
