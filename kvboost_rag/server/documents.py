"""Documents that a request names or brings, and those that it adds, one after the other; runs in worker threads."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from pydantic import ValidationError

from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits
from kvboost_rag.server.schemas import NewDocument
from kvboost_rag.server.service import Tenant
from kvboost_rag.server.writes import Since
from kvboost_rag.types import Document

__all__ = [
    "add_documents", "check_batch", "check_count", "chosen_documents", "keep_documents", "known_document",
    "new_documents", "read_documents",
]  # fmt: skip


def known_document(engine: KVBoostEngine, document_id: str, *, status: int = 404) -> Document:
    """Return a document of this namespace.

    Raises
    ------
    ApiError
        If there is none with this id, with the same words whether or not another namespace has one.
    """
    found = engine.get_document(document_id)
    if found is None:
        raise ApiError(
            status, f"document {document_id!r} is not known; add it by POST /v1/documents", "document_not_found",
            "documents",
        )  # fmt: skip
    return found


def check_count(given: Sequence[str | NewDocument], limits: Limits) -> None:
    """Refuse more documents than a request may name or bring."""
    if len(given) > limits.max_documents:
        raise ApiError(
            400, f"the request has {len(given)} documents, and the server takes {limits.max_documents}; pass fewer",
            "too_many_documents", "documents",
        )  # fmt: skip


def chosen_documents(
    engine: KVBoostEngine, given: Sequence[str | NewDocument], limits: Limits
) -> list[Document]:
    """Turn ids and texts into documents, in the order of the prompt."""
    check_count(given, limits)
    return [known_document(engine, d, status=400) if isinstance(d, str) else _made(d) for d in given]


def new_documents(engine: KVBoostEngine, chosen: Sequence[Document], limits: Limits) -> list[Document]:
    """Return documents whose id is not known yet, each id once; refuse them if there is no room.

    A known id with another text is computed in place: what a retriever returns may be an extract, and only
    ``POST /v1/documents`` replaces.
    """
    new = {d.id: d for d in chosen if engine.get_document(d.id) is None}
    _check_room(engine, len(new), limits)
    return list(new.values())


def keep_documents(
    caller: Tenant, given: Sequence[Document], since: Since, *, replaces: bool = False
) -> Generator[None, None, None]:
    """Add documents that came with a request, but for those that were written or deleted since.

    Yields after each, so that it can be broken off. A known id keeps its text unless ``replaces`` says otherwise.
    """
    for document in given:
        with caller.writes.unless_written(document.id, since) as is_free:
            known = caller.engine.get_document(document.id)
            if is_free and (known != document if replaces else known is None):
                caller.engine.add_documents([document])
        yield


def check_batch(given: Sequence[NewDocument], limits: Limits) -> None:
    """Refuse too many documents at once, and an id that comes twice."""
    if len(given) > limits.max_batch_documents:
        raise ApiError(
            400, f"the request adds {len(given)} documents, and the server takes {limits.max_batch_documents} at once; "
            "pass fewer", "too_many_documents", "documents",
        )  # fmt: skip
    if len({document.id for document in given}) < len(given):
        raise ApiError(400, "a document id comes twice; give each document its own", "invalid_value", "documents")


def add_documents(caller: Tenant, given: Sequence[NewDocument], limits: Limits) -> Generator[Document, None, None]:
    """Add documents; yield each when it is there. Those that are done stay when this is closed or one is refused."""
    _check_room(caller.engine, sum(caller.engine.get_document(d.id) is None for d in given), limits)
    for document in map(_made, given):
        with caller.writes.writing(document.id):
            caller.engine.add_documents([document])
        yield document


def read_documents(path: Path) -> list[Document]:
    """Read a file with one document a line, each as ``POST /v1/documents`` takes it.

    Raises
    ------
    ValueError
        For a line that is no document; it is named.
    OSError
        If the file can not be read.
    """
    lines = path.read_bytes().splitlines()
    return [_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _line(path: Path, number: int, line: bytes) -> Document:
    try:
        return _made(NewDocument.model_validate_json(line))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}; write a document as "
            '{"id": "...", "text": "..."} in each line'
        ) from error


def _made(given: NewDocument) -> Document:
    return Document(given.id, given.text, given.version, given.metadata)


def _check_room(engine: KVBoostEngine, new: int, limits: Limits) -> None:
    if new and len(engine.documents) + new > limits.max_known_documents:
        raise ApiError(
            400, f"there is no room for {new} more documents; the namespace holds {limits.max_known_documents} at "
            "most, so delete some", "too_many_documents", "documents",
        )  # fmt: skip
