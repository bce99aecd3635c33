"""Chats and completions at the front."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvboost_rag.replicas.handing import Task, ask_all, asked_of
from kvboost_rag.replicas.service import Front, FrontService, Namespace
from kvboost_rag.server.documents import check_count
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.schemas import AskedFields, ChatRequest, CompletionRequest, NewDocument
from kvboost_rag.server.service import check_model
from kvboost_rag.server.writes import Since

__all__ = ["router"]

logger = logging.getLogger("kvboost_rag.replicas")

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
    # No replica computes anything for a request that is refused for these.
    check_model(body.model, front.options.name)
    given = body.documents or []
    check_count(given, front.options.limits)
    since = front.catalogue.since(namespace)
    brought = [d for d in given if isinstance(d, NewDocument)]
    known = _known(front, namespace, given)
    new = [d for d in brought if d.id not in known] if _registers(front, body) else []
    front.catalogue.check_room(namespace, [d.id for d in new])
    sizes = {d.id: float(len(d.text)) for d in (*known.values(), *brought)}
    task = Task(await asked_of(request), namespace, [d.model_dump() for d in known.values()], sizes)
    try:
        response = await front.hand_over(request, task)
        if response.status_code == 200:
            for document in new:
                front.catalogue.keep(namespace, document, since)
        return response
    finally:
        await _forget_again(front, namespace, sizes, since)


def _known(front: FrontService, namespace: str, given: Sequence[str | NewDocument]) -> dict[str, NewDocument]:
    """Return the documents of the catalogue that a request names or brings, by id.

    A replica that has not seen one would take the text that comes under its id, which may be an extract, for all of it.
    """
    named = [front.catalogue.found(namespace, d, status=400) for d in given if isinstance(d, str)]
    there = front.catalogue.of(namespace)
    return {d.id: d for d in (*named, *(there[d.id] for d in given if not isinstance(d, str) and d.id in there))}


def _registers(front: FrontService, body: AskedFields) -> bool:
    return body.register_documents and not front.options.engine.get("trusted_only")


async def _forget_again(front: FrontService, namespace: str, document_ids: Iterable[str], since: Since) -> None:
    """Forget what was deleted while a request was on its way: its replica may have been told it after that."""
    for document_id in front.catalogue.removed(namespace, document_ids, since):
        try:
            await ask_all(front.handle, "forget", namespace, document_id)
        except ApiError:
            # The answer is there, and is not worse for it.
            logger.exception("a deleted document may be left at a replica")
