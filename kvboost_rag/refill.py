"""Documents that were evicted and are asked for again come back, behind the answer that missed them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from kvboost_rag.library import Library

__all__ = ["Refill"]

logger = logging.getLogger("kvboost_rag")


class Refill:
    """Encodes documents in the background, one after the other.

    What a prompt computed is never stored: a missing document was computed in place, after whatever stood before it,
    and has to be encoded once more behind its canonical context.

    Parameters
    ----------
    library
        Encodes; it knows what is missing and whether the store would keep it.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._worker: ThreadPoolExecutor | None = None
        self._closed = False

    def ask(self, document_ids: Iterable[str]) -> None:
        """Have documents encoded soon; returns at once."""
        with self._lock:
            for document_id in document_ids:
                if document_id in self._asked or self._closed:
                    continue
                if self._worker is None:
                    self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvboost-refill")
                self._asked.add(document_id)
                self._worker.submit(self._encode, document_id)

    def _encode(self, document_id: str) -> None:
        try:
            if not self._closed:
                self._library.restore(document_id)
        except Exception:
            # Nobody waits for a worker's result; the document is computed in place until it can be encoded.
            logger.exception("document %r could not be encoded again", document_id)
        finally:
            with self._lock:
                self._asked.discard(document_id)

    def wait(self) -> None:
        """Return when everything that was asked for so far is done."""
        with self._lock:
            last = self._worker.submit(int) if self._worker and not self._closed else None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with self._lock:
            self._closed = True
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
