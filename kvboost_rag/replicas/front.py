"""What clients talk to: it knows whose a request is and which documents it names, and hands it to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.handle import DeploymentHandle
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvboost_rag.replicas.catalogue import Catalogue, described
from kvboost_rag.replicas.figures import together
from kvboost_rag.replicas.handing import Task, ask_all, asked_of, hand_over
from kvboost_rag.replicas.options import ReplicaOptions
from kvboost_rag.server.auth import OPERATOR
from kvboost_rag.server.bodies import LimitBody
from kvboost_rag.server.documents import check_batch
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.first_check import CheckKey
from kvboost_rag.server.handlers import HANDLERS
from kvboost_rag.server.schemas import (
    AddDocuments,
    AskedFields,
    ChatRequest,
    CompletionRequest,
    NewDocument,
    PostedDocuments,
)

__all__ = ["create_front"]

router = APIRouter()
# Documents of one request that are encoded at a time.
_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class _Front:
    handle: DeploymentHandle[Any]
    options: ReplicaOptions
    catalogue: Catalogue

    async def hand_over(self, request: Request, task: Task) -> Response:
        return await hand_over(self.handle, request, task, send_timeout=self.options.limits.send_timeout)


def create_front(
    handle: DeploymentHandle[Any], options: ReplicaOptions, *, hosts: Sequence[str] = ("*",)
) -> FastAPI:
    """Make the application in front of replicas; it computes nothing and speaks the server's API.

    It holds the documents' texts, so that a replica which has not seen a document is told it with the request.

    Parameters
    ----------
    handle
        From :func:`kvboost_rag.replicas.start_replicas`.
    options
        The replicas' own.
    hosts
        As for :func:`kvboost_rag.server.create_app`.
    """
    app = FastAPI(title="kvboost_rag", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.front = _Front(handle, options, Catalogue(options.limits.max_known_documents))
    limits = options.limits
    app.add_middleware(LimitBody, max_bytes=limits.max_body_bytes, seconds=limits.receive_timeout)
    app.add_middleware(CheckKey, keys=options.keys)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.include_router(router)
    return app


async def _front_of(request: Request) -> _Front:
    front: _Front = request.app.state.front
    return front


Front = Annotated[_Front, Depends(_front_of)]


async def _namespace(request: Request, front: Front) -> str:
    namespace = front.options.keys.namespace(request.headers.get("authorization"))
    if namespace == OPERATOR:
        raise ApiError(403, "this key reads /metrics alone; send the key of a namespace", "wrong_kind_of_key")
    return namespace


Namespace = Annotated[str, Depends(_namespace)]


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that requests are taken."""
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(request: Request, front: Front) -> Response:
    """Return the figures of all replicas for Prometheus."""
    keys = front.options.keys
    if keys.namespace(request.headers.get("authorization")) != OPERATOR and keys.digests:
        raise ApiError(
            403, "the metrics tell about all namespaces; send the key of the namespace '*'", "wrong_kind_of_key"
        )
    return Response(together(dict(await ask_all(front.handle, "figures"))), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
@router.get("/v1/models/{name:path}")
async def models(request: Request, front: Front) -> Response:
    """Let any replica say what is served."""
    return await front.hand_over(request, Task(await asked_of(request)))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, front: Front, namespace: Namespace) -> Response:
    """Let the replica answer that has the documents."""
    return await _answer(body, request, front, namespace)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, front: Front, namespace: Namespace) -> Response:
    """Let the replica answer that has the documents."""
    return await _answer(body, request, front, namespace)


async def _answer(body: AskedFields, request: Request, front: _Front, namespace: str) -> Response:
    given = body.documents or []
    known = [front.catalogue.found(namespace, d, status=400) for d in given if isinstance(d, str)]
    brought = [d for d in given if isinstance(d, NewDocument)]
    registers = body.register_documents and not front.options.engine.get("trusted_only")
    new = [d for d in brought if registers and d.id not in front.catalogue.of(namespace)]
    front.catalogue.check_room(namespace, [d.id for d in new])
    sizes = {d.id: float(len(d.text)) for d in (*known, *brought)}
    task = Task(await asked_of(request), namespace, [d.model_dump() for d in known], sizes)
    response = await front.hand_over(request, task)
    if response.status_code == 200:
        for document in new:
            front.catalogue.add(namespace, document)
    return response


@router.post("/v1/documents")
async def post_documents(
    body: PostedDocuments, request: Request, front: Front, namespace: Namespace
) -> Response:
    """Add documents, each at its home; what was added stays, whatever happens to the rest."""
    given = body.documents if isinstance(body, AddDocuments) else [body]
    if isinstance(body, AddDocuments) and body.stream:
        raise ApiError(400, "replicas tell no progress; leave stream out", "unsupported_value", "stream")
    check_batch(given, front.options.limits)
    front.catalogue.check_room(namespace, [d.id for d in given])
    places = asyncio.Semaphore(_AT_ONCE)
    responses = await asyncio.gather(*(_added(d, request, front, namespace, places) for d in given))
    refused = next((response for response in responses if response.status_code != 200), None)
    if refused is not None or isinstance(body, NewDocument):
        return refused or responses[0]
    return JSONResponse({"object": "list", "data": [described(d) for d in given]})


async def _added(
    document: NewDocument, request: Request, front: _Front, namespace: str, places: asyncio.Semaphore
) -> Response:
    async with places:
        asked = await asked_of(request)
        asked["body"] = document.model_dump_json().encode()
        sizes = {document.id: float(len(document.text))}
        response = await front.hand_over(request, Task(asked, namespace, (), sizes))
    if response.status_code == 200:
        front.catalogue.add(namespace, document)
    return response


@router.get("/v1/documents")
async def list_documents(
    front: Front, namespace: Namespace, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> dict[str, Any]:
    """List documents in the order of adding, a page at a time."""
    page, has_more = front.catalogue.page(namespace, limit, after)
    return {"object": "list", "data": page, "has_more": has_more}


@router.get("/v1/documents/{document_id:path}")
async def get_document(document_id: str, front: Front, namespace: Namespace) -> dict[str, Any]:
    """Return a document with its text."""
    document = front.catalogue.found(namespace, document_id)
    return {**described(document), "text": document.text}


@router.delete("/v1/documents/{document_id:path}")
async def delete_document(document_id: str, front: Front, namespace: Namespace) -> dict[str, Any]:
    """Forget a document and its KV, on every replica, also one that the front does not know."""
    # If a replica fails to forget it, the document is still there to be deleted.
    was_known = await ask_all(front.handle, "forget", namespace, document_id)
    if not any(was_known):
        front.catalogue.found(namespace, document_id)
    front.catalogue.remove(namespace, document_id)
    return {"id": document_id, "object": "document", "deleted": True}
