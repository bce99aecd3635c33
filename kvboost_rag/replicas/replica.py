"""One replica: the server's application in a process of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from anyio import to_thread
from ray import serve

from kvboost_rag.loading import load_model
from kvboost_rag.replicas.carrying import Asked, Begun, answered
from kvboost_rag.replicas.logs import log_to_stderr, logging_failures
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.server import Engines, Service, create_app
from kvboost_rag.types import Document

__all__ = ["Replica"]


class Replica:
    """Answers requests that the front hands on.

    Parameters
    ----------
    options
        What all replicas have in common.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        log_to_stderr(self._name, options.log_level)
        model, tokenizer = load_model(options.model, device=_device())
        self._engines = Engines(model, tokenizer, options.name, options.keys.namespaces, options.engine)
        self._service = Service(self._engines, options.keys, options.limits)
        self._app = logging_failures(create_app(self._service))

    async def answer(
        self, asked: Asked, namespace: str, known: Sequence[Mapping[str, Any]], sizes: Mapping[str, float]
    ) -> AsyncGenerator[Begun | bytes, None]:
        """Answer a request; the header ``x-kvboost-replica`` of the response names this replica.

        Parameters
        ----------
        asked
            The request.
        namespace
            Whose it is; nothing where it names no documents.
        known
            The documents that it names, which this replica may not have seen yet.
        sizes
            For the router alone.
        """
        if known:
            await to_thread.run_sync(self._add, namespace, known)
        items = answered(self._app, asked)
        try:
            async for item in items:
                if isinstance(item, dict):
                    item["headers"].append((b"x-kvboost-replica", self._name.encode()))
                yield item
        finally:
            await items.aclose()

    def _add(self, namespace: str, known: Sequence[Mapping[str, Any]]) -> None:
        engine = self._engines[namespace]
        documents = [Document(**fields) for fields in known]
        engine.add_documents([d for d in documents if engine.get_document(d.id) != d])

    async def forget(self, namespace: str, document_id: str) -> bool:
        """Forget a document and its KV; return whether it was known here."""
        return await to_thread.run_sync(self._forget, namespace, document_id)

    def _forget(self, namespace: str, document_id: str) -> bool:
        try:
            self._engines[namespace].remove_documents([document_id])
        except KeyError:
            return False
        return True

    async def figures(self) -> tuple[str, str]:
        """Return this replica's name, and its figures for Prometheus."""
        return self._name, (await to_thread.run_sync(self._service.metrics.text)).decode()

    def __del__(self) -> None:
        """Release the KV; Ray Serve calls this before it ends the process."""
        if hasattr(self, "_engines"):
            self._engines.close()


def _device() -> str | None:
    """Return where to compute: on the GPU that Ray gives this process, which sees no other one, if it gives one."""
    return "cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else None
