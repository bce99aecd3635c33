"""One replica: the server's application in a process of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from anyio import to_thread
from ray import serve

from kvboost_rag.loading import load_model
from kvboost_rag.replicas.carrying import Asked, Begun, answered
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
        model, tokenizer = load_model(options.model)
        self._engines = Engines(model, tokenizer, options.name, options.keys.namespaces, options.engine)
        self._app = create_app(Service(self._engines, options.keys, options.limits))
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

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
                    item["headers"].append((b"x-kvboost-replica", self._name))
                yield item
        finally:
            await items.aclose()

    def _add(self, namespace: str, known: Sequence[Mapping[str, Any]]) -> None:
        engine = self._engines[namespace]
        documents = [Document(**fields) for fields in known]
        engine.add_documents([d for d in documents if engine.get_document(d.id) != d])

    async def forget(self, namespace: str, document_id: str) -> None:
        """Forget a document and its KV, if it is known here."""
        engine = self._engines[namespace]
        if engine.get_document(document_id) is not None:
            await to_thread.run_sync(engine.remove_documents, [document_id])

    def __del__(self) -> None:
        """Release the KV; Ray Serve calls this before it ends the process."""
        if hasattr(self, "_engines"):
            self._engines.close()
