"""``/v1/documents`` at the front."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from kvboost_rag.replicas.catalogue import described
from kvboost_rag.replicas.handing import Task, ask_all, asked_of
from kvboost_rag.replicas.service import Front, FrontService, Namespace
from kvboost_rag.server.documents import check_batch
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.schemas import AddDocuments, NewDocument, PostedDocuments

__all__ = ["router"]

router = APIRouter()
# Documents of one request that are encoded at a time.
_AT_ONCE = 4


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
    responses = await _all(_added(d, request, front, namespace, places) for d in given)
    refused = next((response for response in responses if response.status_code != 200), None)
    if refused is not None or isinstance(body, NewDocument):
        return refused or responses[0]
    return JSONResponse({"object": "list", "data": [described(d) for d in given]})


async def _all(parts: Iterable[Coroutine[Any, Any, Response]]) -> list[Response]:
    """Await all at once; if one raises, or nobody waits any more, the others do not go on."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _added(
    document: NewDocument, request: Request, front: FrontService, namespace: str, places: asyncio.Semaphore
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
    # Before the replicas forget it, so that from here on none is told it anew.
    removed = front.catalogue.remove(namespace, document_id)
    since = front.catalogue.since(namespace)
    try:
        was_known = await ask_all(front.handle, "forget", namespace, document_id)
    except BaseException:
        # If a replica fails to forget it, the document is still there to be deleted.
        if removed is not None:
            front.catalogue.keep(namespace, removed, since)
        raise
    if removed is None and not any(was_known):
        front.catalogue.found(namespace, document_id)
    return {"id": document_id, "object": "document", "deleted": True}
