"""Chats and completions at the front."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvboost_rag.replicas.handing import Task, asked_of
from kvboost_rag.replicas.service import Front, FrontService, Namespace
from kvboost_rag.server.schemas import AskedFields, ChatRequest, CompletionRequest, NewDocument

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, front: Front, namespace: Namespace) -> Response:
    """Let the replica answer that has the documents."""
    return await _answer(body, request, front, namespace)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, front: Front, namespace: Namespace) -> Response:
    """Let the replica answer that has the documents."""
    return await _answer(body, request, front, namespace)


async def _answer(body: AskedFields, request: Request, front: FrontService, namespace: str) -> Response:
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
