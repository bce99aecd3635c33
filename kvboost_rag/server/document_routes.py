"""``/v1/documents``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.server.documents import add_documents, check_batch, known_document
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.running import unless_gone, working
from kvboost_rag.server.schemas import AddDocuments, NewDocument, PostedDocuments
from kvboost_rag.server.service import Caller, Served
from kvboost_rag.server.sse import EventStream
from kvboost_rag.types import Document

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/documents", response_model=None)
async def post_documents(
    body: PostedDocuments, request: Request, service: Served, caller: Caller
) -> Response:
    """Add one document or several; what was added stays, whatever happens to the rest."""
    given = body.documents if isinstance(body, AddDocuments) else [body]
    check_batch(given, service.limits)
    added = working(service, caller, lambda: add_documents(caller, given, service.limits))
    if isinstance(body, AddDocuments) and body.stream:
        first = await unless_gone(request, anext(added))
        return EventStream(service, _progress(first, added, len(given)), added)
    async with aclosing(added):
        documents = await unless_gone(request, _all(added))
    listed = [_described(document) for document in documents]
    return JSONResponse(listed[0] if isinstance(body, NewDocument) else {"object": "list", "data": listed})


# Plain functions run in a thread: the engine's lock may be held for as long as a prefill takes.
@router.get("/v1/documents")
def list_documents(
    caller: Caller, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> dict[str, Any]:
    """List documents in the order of adding, a page at a time; ``after`` is the last id of the page before."""
    documents = caller.engine.documents
    start = 0 if after is None else _place(documents, after) + 1
    page = [_described(document) for document in islice(documents, start, start + limit)]
    return {"object": "list", "data": page, "has_more": start + limit < len(documents)}


@router.get("/v1/documents/{document_id:path}")
def get_document(document_id: str, caller: Caller) -> dict[str, Any]:
    """Return a document with its text, and how often it was retrieved, used in a prompt, and served from stored KV."""
    document = known_document(caller.engine, document_id)
    return {**_described(document), "text": document.text, "usage": _counts(caller.engine, document_id)}


@router.delete("/v1/documents/{document_id:path}")
def delete_document(document_id: str, caller: Caller) -> dict[str, Any]:
    """Forget a document and its KV, in every tier."""
    with caller.writes.writing(document_id):
        known_document(caller.engine, document_id)
        caller.engine.remove_documents([document_id])
    return {"id": document_id, "object": "document", "deleted": True}


async def _all(added: AsyncIterator[Document]) -> list[Document]:
    return [document async for document in added]


async def _progress(first: Document, added: AsyncIterator[Document], total: int) -> AsyncIterator[dict[str, Any]]:
    done = 1
    yield {"object": "document.progress", "id": first.id, "done": done, "total": total}
    async for document in added:
        done += 1
        yield {"object": "document.progress", "id": document.id, "done": done, "total": total}


def _described(document: Document) -> dict[str, Any]:
    return {
        "id": document.id, "object": "document", "version": document.version, "characters": len(document.text),
        "metadata": dict(document.metadata),
    }  # fmt: skip


def _place(documents: list[Document], document_id: str) -> int:
    for i, document in enumerate(documents):
        if document.id == document_id:
            return i
    raise ApiError(404, f"document {document_id!r} is not known; leave 'after' out", "document_not_found", "after")


def _counts(engine: KVBoostEngine, document_id: str) -> dict[str, int]:
    usage = engine.usage(document_id)
    return {"retrieved": round(usage.retrieved), "used": round(usage.used), "served": round(usage.served)}
