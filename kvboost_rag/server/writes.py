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
    """What is done to the documents of one namespace: to each of them one thing after the other; safe in threads.

    Only who wants the same document waits, and nobody waits in :meth:`since`, which event loops call.
    """

    def __init__(self) -> None:
        # Held for bookkeeping alone: a document takes as long as its prefill.
        self._changed = threading.Condition()
        self._taken: set[str] = set()
        self._open: WeakSet[Since] = WeakSet()

    def since(self) -> Since:
        """Begin to note ids."""
        since = Since()
        with self._changed:
            self._open.add(since)
        return since

    @contextmanager
    def writing(self, document_id: str) -> Iterator[None]:
        """Write or delete a document in here."""
        with self._having(document_id):
            with self._changed:
                for since in self._open:
                    since.ids.add(document_id)
            yield

    @contextmanager
    def unless_written(self, document_id: str, since: Since) -> Iterator[bool]:
        """Yield whether nobody has written or deleted a document; nobody does as long as this lasts."""
        with self._having(document_id):
            with self._changed:
                is_free = document_id not in since.ids
            yield is_free

    @contextmanager
    def _having(self, document_id: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: document_id not in self._taken)
            self._taken.add(document_id)
        try:
            yield
        finally:
            with self._changed:
                self._taken.discard(document_id)
                self._changed.notify_all()
