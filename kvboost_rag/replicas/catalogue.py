"""The documents of all namespaces as text, from which any replica can be told what it does not know yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.schemas import NewDocument
from kvboost_rag.server.writes import Since, Writes

__all__ = ["Catalogue"]


class Catalogue:
    """Holds documents by namespace and id; used in one event loop.

    Parameters
    ----------
    max_documents
        Of one namespace.
    """

    def __init__(self, max_documents: int) -> None:
        self._max_documents = max_documents
        self._known: dict[str, dict[str, NewDocument]] = {}
        self._writes: defaultdict[str, Writes] = defaultdict(Writes)

    def of(self, namespace: str) -> Mapping[str, NewDocument]:
        """Return a namespace's documents by id, in the order of adding."""
        return self._known.get(namespace, {})

    def add(self, namespace: str, document: NewDocument) -> None:
        """Take a document that was posted, or its new version."""
        with self._writes[namespace].writing(document.id):
            self._known.setdefault(namespace, {})[document.id] = document

    def remove(self, namespace: str, document_id: str) -> NewDocument | None:
        """Forget a document and return it, if it is there."""
        with self._writes[namespace].writing(document_id):
            return self._known.get(namespace, {}).pop(document_id, None)

    def since(self, namespace: str) -> Since:
        """Begin to note which documents are added and removed."""
        return self._writes[namespace].since()

    def keep(self, namespace: str, document: NewDocument, since: Since) -> None:
        """Take a document that a request brought, unless its id is known or was added or removed since it came."""
        with self._writes[namespace].unless_written(document.id, since) as is_free:
            if is_free:
                self._known.setdefault(namespace, {}).setdefault(document.id, document)

    def removed(self, namespace: str, document_ids: Iterable[str], since: Since) -> list[str]:
        """Return those of some documents that were removed since a request came, and not added again."""
        known = self.of(namespace)
        return [name for name in document_ids if name in since.ids and name not in known]

    def check_room(self, namespace: str, document_ids: Iterable[str]) -> None:
        """Refuse more documents than a namespace may have."""
        known = self.of(namespace)
        if len(known) + len(set(document_ids) - set(known)) > self._max_documents:
            raise ApiError(
                400, f"the namespace would have more than {self._max_documents} documents; delete some by DELETE "
                "/v1/documents/ID", "too_many_documents", "documents",
            )  # fmt: skip

    def found(self, namespace: str, document_id: str, status: int = 404, param: str = "documents") -> NewDocument:
        """Return a document.

        Raises
        ------
        ApiError
            If there is none with this id.
        """
        try:
            return self.of(namespace)[document_id]
        except KeyError:
            raise ApiError(
                status, f"document {document_id!r} is not known; add it by POST /v1/documents", "document_not_found",
                param,
            ) from None  # fmt: skip

    def page(self, namespace: str, limit: int, after: str | None) -> tuple[Sequence[dict[str, Any]], bool]:
        """Describe a page of documents, and say whether more follow."""
        known = self.of(namespace)
        start = 0
        if after is not None:
            self.found(namespace, after, param="after")
            start = list(known).index(after) + 1
        page = [described(document) for document in islice(known.values(), start, start + limit)]
        return page, start + limit < len(known)


def described(document: NewDocument) -> dict[str, Any]:
    """Describe a document without its text."""
    return {
        "id": document.id, "object": "document", "version": document.version, "characters": len(document.text),
        "metadata": document.metadata,
    }  # fmt: skip
