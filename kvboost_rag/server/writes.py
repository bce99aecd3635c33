"""Which documents were written or deleted while a request waited and ran; that counts more than what it brought."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

__all__ = ["Since", "Writes"]


class Since:
    """Ids that were written or deleted since a request came; noted for as long as the request holds this."""

    def __init__(self) -> None:
        self.ids: set[str] = set()


class Writes:
    """What ``/v1/documents`` does to the documents of one namespace, one after the other; safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakSet[Since] = WeakSet()

    def since(self) -> Since:
        """Begin to note ids."""
        since = Since()
        with self._lock:
            self._open.add(since)
        return since

    @contextmanager
    def writing(self, document_id: str) -> Iterator[None]:
        """Write or delete a document in here."""
        with self._lock:
            for since in self._open:
                since.ids.add(document_id)
            yield

    @contextmanager
    def unless_written(self, document_id: str, since: Since) -> Iterator[bool]:
        """Yield whether nobody has written or deleted a document; nobody does as long as this lasts."""
        with self._lock:
            yield document_id not in since.ids
