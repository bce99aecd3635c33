"""One writer at a time in a folder, over all threads and processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvboost_rag.reading import read_bounded
from kvboost_rag.store.base import logger
from kvboost_rag.store.layout import LOCK, WRITER

__all__ = ["FolderLock"]

_POLL_SECONDS = 0.01
_LONGEST_NAME = 64


class FolderLock:
    """The lock of a cache folder. The operating system frees it when its holder dies.

    Parameters
    ----------
    folder
        The cache folder.
    wait_seconds
        How long to wait for another writer at most.
    """

    def __init__(self, folder: Path, wait_seconds: float = 10.0) -> None:
        self._folder = folder
        self._wait = wait_seconds
        self._name = secrets.token_hex(8)

    @contextmanager
    def held(self, purpose: str) -> Iterator[bool]:
        """Hold the lock for a block; False (and a log line) if another writer held it for too long.

        Parameters
        ----------
        purpose
            What does not happen without it, for the log.

        Raises
        ------
        OSError
            If the folder can not be locked.
        """
        lock = self._acquired(purpose)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _acquired(self, purpose: str) -> FileLock | None:
        # A new object each time: one that was made before a fork can not be used after it.
        lock = FileLock(self._folder / LOCK)
        try:
            lock.acquire(timeout=self._wait, poll_interval=_POLL_SECONDS)
        except Timeout:
            logger.warning("%s: not done, %s was locked for %g seconds", purpose, self._folder, self._wait)
            return None
        return lock

    def is_mine(self) -> bool:
        """Whether nobody else held the lock since this was last asked; to be asked by every holder.

        Raises
        ------
        OSError
            If the folder can not be written.
        """
        path = self._folder / WRITER
        # After a fork there are two holders with one name.
        name = f"{os.getpid()}-{self._name}"
        if _written_in(path) == name.encode():
            return True
        # Not written into what is there, which may be a link to a file that is none of ours.
        path.unlink(missing_ok=True)
        try:
            with path.open("xb") as file:
                file.write(name.encode())
        except OSError:
            # On a full disk no name is as good as another one: whoever asks next will not find its own.
            path.unlink(missing_ok=True)
        return False


def _written_in(path: Path) -> bytes | None:
    try:
        return read_bounded(path, _LONGEST_NAME)
    except (OSError, ValueError):
        return None
