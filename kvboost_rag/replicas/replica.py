"""One replica: the server's application in a process of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import ray
from anyio import to_thread
from ray import serve

from kvboost_rag.loading import load_model
from kvboost_rag.replicas.carrying import Asked, Begun, answered
from kvboost_rag.replicas.logs import log_to_stderr, logging_failures
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.server import Engines, Service, create_app
from kvboost_rag.server.documents import keep_documents
from kvboost_rag.server.heap import share_one_heap
from kvboost_rag.server.running import working
from kvboost_rag.server.service import Tenant
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
        share_one_heap()
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
            Documents that it names or brings, as the front has them; this replica may not have seen them yet.
        sizes
            For the router alone.
        """
        if known:
            await self._tell(self._service.tenants[namespace], known)
        items = answered(self._app, asked)
        try:
            async for item in items:
                if isinstance(item, dict):
                    item["headers"].append((b"x-kvboost-replica", self._name.encode()))
                yield item
        finally:
            await items.aclose()

    async def _tell(self, tenant: Tenant, known: Sequence[Mapping[str, Any]]) -> None:
        since = tenant.writes.since()
        # Most often all are there, and then the request waits for no second place.
        new = await to_thread.run_sync(_missing, tenant, known)
        if new:
            keep = partial(keep_documents, tenant, new, since, replaces=True)
            async with aclosing(working(self._service, tenant, keep)) as kept:
                async for _ in kept:
                    pass

    async def forget(self, namespace: str, document_id: str) -> bool:
        """Forget a document and its KV; return whether it was known here."""
        return await to_thread.run_sync(self._forget, namespace, document_id)

    def _forget(self, namespace: str, document_id: str) -> bool:
        tenant = self._service.tenants[namespace]
        with tenant.writes.writing(document_id):
            try:
                tenant.engine.remove_documents([document_id])
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


def _missing(tenant: Tenant, known: Sequence[Mapping[str, Any]]) -> list[Document]:
    documents = [Document(**fields) for fields in known]
    return [document for document in documents if tenant.engine.get_document(document.id) != document]


def _device() -> str | None:
    """Return where to compute: on the GPU that Ray gives this process, which sees no other one, if it gives one."""
    return "cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else None
