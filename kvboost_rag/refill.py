"""Documents that were evicted and are asked for again come back, behind the answer that missed them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvboost_rag.errors import EngineClosedError
from kvboost_rag.library import Library

__all__ = ["Refill"]

logger = logging.getLogger("kvboost_rag")

_LONGEST_PAUSE = 1023


@dataclass
class _Attempt:
    """The latest attempt at a document: how often it was served before, and how many requests to pass over."""

    served: int
    pause: int = 0
    left: int = 0


class Refill:
    """Encodes documents in the background, one after the other.

    What a prompt computed is never stored: a missing document was computed in place, after whatever stood before it,
    and has to be encoded once more behind its canonical context. That is in vain where a document is evicted again
    before it is served; after each such attempt twice as many requests are passed over before the next.

    Parameters
    ----------
    library
        Encodes; it knows what is missing and whether the store would keep it.
    served
        How often a document's KV came out of the store.
    """

    def __init__(self, library: Library, served: Callable[[str], int]) -> None:
        self._library = library
        self._served = served
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._attempts: dict[str, _Attempt] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._closed = False

    def ask(self, document_ids: Iterable[str]) -> None:
        """Have documents encoded soon; returns at once."""
        # Counted before the lock is taken, because counting takes the engine's.
        served = {document_id: self._served(document_id) for document_id in document_ids}
        with self._lock:
            for document_id, count in served.items():
                if document_id not in self._asked and not self._closed and self._is_due(document_id, count):
                    if self._submitted(self._encode, document_id) is not None:
                        self._asked.add(document_id)

    def _is_due(self, document_id: str, served: int) -> bool:
        attempt = self._attempts.get(document_id)
        if attempt is None or attempt.served != served:
            self._attempts[document_id] = _Attempt(served)
            return True
        if attempt.left:
            attempt.left -= 1
            return False
        attempt.pause = attempt.left = min(2 * attempt.pause + 1, _LONGEST_PAUSE)
        return True

    def _submitted(self, work: Callable[..., object], *arguments: str) -> Future[object] | None:
        """Hand over work; None where the interpreter is exiting and takes no more."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvboost-refill")
        try:
            return self._worker.submit(work, *arguments)
        except RuntimeError:
            return None

    def _encode(self, document_id: str) -> None:
        try:
            if not self._closed:
                self._library.restore(document_id)
        except EngineClosedError:
            return
        except Exception:
            # Nobody waits for a worker's result; the document is computed in place until it can be encoded.
            logger.exception("document %r could not be encoded again", document_id)
        finally:
            with self._lock:
                self._asked.discard(document_id)

    def wait(self) -> None:
        """Return when everything that was asked for so far is done, or dropped by :meth:`close`."""
        with self._lock:
            last = None if self._closed or self._worker is None else self._submitted(int)
        try:
            if last is not None:
                last.result()
        except CancelledError:
            return

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with self._lock:
            self._closed = True
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
