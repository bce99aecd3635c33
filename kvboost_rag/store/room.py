"""Bytes of a cache folder under a budget, over all identities and processes."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from kvboost_rag.store.base import logger
from kvboost_rag.store.chunk_file import touch
from kvboost_rag.store.file_index import FileIndex
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import folder_bytes, identity_folders

__all__ = ["Order", "Room", "eviction_order"]

Order = Callable[[Iterable[ChunkFile]], Iterable[ChunkFile]]

# For the file that names the last writer.
_RESERVED_BYTES = 64
# Seeing what there is costs one look at every file, so that much more is freed at once.
_FREED_AT_ONCE = 0.01


class Room:
    """Makes room for files; every call is made by the holder of the folder's lock.

    Parameters
    ----------
    folder
        The cache folder.
    own
        The index of the store's own files.
    max_bytes
        Budget over everything in the folder; None for no limit.
    """

    def __init__(self, folder: Path, own: FileIndex, max_bytes: int | None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._indexes = {own.identity: own}
        self._bytes: int | None = None

    def forget(self) -> None:
        """Count again before the next file, because another writer was here."""
        self._bytes = None

    def added(self, nbytes: int) -> None:
        """Take a written file into account."""
        if self._bytes is not None:
            self._bytes += nbytes

    def make(self, nbytes: int, order: Order) -> bool:
        """Remove files until ``nbytes`` more fit, damaged ones first.

        Parameters
        ----------
        nbytes
            Of the file that is to be written.
        order
            Lists those of the files that may go, as they are to go.

        Returns
        -------
        bool
            False if they can not fit; nothing is removed then.
        """
        if self._max_bytes is None:
            return True
        limit = self._max_bytes - _RESERVED_BYTES - nbytes
        if self._bytes is None or self._bytes > limit:
            self._bytes = folder_bytes(self._folder)
        if self._bytes > limit:
            self._bytes = self._evicted(self._bytes, limit, int(_FREED_AT_ONCE * self._max_bytes), order)
        return self._bytes <= limit

    def can_ever_hold(self, nbytes: int) -> bool:
        """Whether a file fits if there is nothing else."""
        return self._max_bytes is None or nbytes <= self._max_bytes - _RESERVED_BYTES

    def has_free(self, nbytes: int) -> bool:
        """Whether a file fits with nothing removed, as far as can be told without the lock."""
        if self._max_bytes is None:
            return True
        limit, known = self._max_bytes - _RESERVED_BYTES - nbytes, self._bytes
        if known is not None and known <= limit:
            return True
        return limit >= 0 and folder_bytes(self._folder) <= limit

    def first_to_go(self, order: Order) -> ChunkFile | None:
        """Return the file that would be evicted first; None if none can be."""
        return next(iter(order(self._files())), None)

    def _evicted(self, present: int, limit: int, at_least: int, order: Order) -> int:
        """Return how much is left when enough was removed, if there is enough to remove."""
        victims = self._victims(order)
        if present - sum(nbytes for _, nbytes in victims) > limit:
            return present
        goal = min(limit, present - at_least)
        for path, nbytes in victims:
            if present <= goal:
                break
            if _removed(path):
                present -= nbytes
        return present

    def _victims(self, order: Order) -> list[tuple[Path, int]]:
        files = self._files()
        damaged = [found for index in list(self._indexes.values()) for found in index.damaged()]
        return damaged + [(file.path, file.nbytes) for file in order(files)]

    def _files(self) -> list[ChunkFile]:
        for own in identity_folders(self._folder):
            if own.name not in self._indexes:
                self._indexes[own.name] = FileIndex(self._folder, own.name)
        # Another thread, without the lock, may add one.
        indexes = list(self._indexes.values())
        for index in indexes:
            index.refresh()
        return [_of_the_past(file) for index in indexes for file in index.current()]


def _of_the_past(file: ChunkFile) -> ChunkFile:
    """Take a file from the future, which a clock that was set back leaves, as one that was used just now."""
    now = time.time()
    if file.used <= now:
        return file
    touch(file.path)
    return replace(file, used=now)


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be evicted: %s", path, error)
        return False
    logger.info("%s evicted", path)
    return True


def eviction_order(
    files: Iterable[ChunkFile],
    *,
    worth: Callable[[ChunkFile], tuple[float, float]],
    kept: Callable[[ChunkFile], bool],
    offered: ChunkFile | None = None,
) -> Iterator[ChunkFile]:
    """Order files by when they are to go: the least worth first, but of a document always the last chunk.

    What stays of a document is then the beginning of it, which is usable. Nothing goes that stands before a chunk
    that is kept, nor for a chunk that is used less often. The offered chunk's own document keeps what stands before
    it, and gives the rest first, whatever it is worth: that is of an earlier version, or of no use without the chunk.

    Parameters
    ----------
    files
        Of any number of documents.
    worth
        Frequency and last use of a file, compared as tuples are.
    kept
        Whether a file must stay.
    offered
        What they are to go for; None if they must go whatever they are worth.
    """
    if offered is None:
        yield from _from_the_ends(files, worth, kept, math.inf)
        return
    own: list[ChunkFile] = []
    others: list[ChunkFile] = []
    for file in files:
        (own if _document(file) == _document(offered) else others).append(file)
    yield from takewhile(lambda file: not kept(file), _behind(own, offered.index))
    yield from _from_the_ends(others, worth, kept, math.inf if kept(offered) else worth(offered)[0])


def _document(file: ChunkFile) -> tuple[str, str]:
    return file.identity, file.document_id


def _behind(files: Iterable[ChunkFile], index: int) -> list[ChunkFile]:
    """Choose a document's files from an index on: what lies in the very place first, as it is replaced, then the last.

    If the last went first, those in front would be taken for the beginning of the new version later on.
    """
    behind = [file for file in files if file.index >= index]
    return sorted(behind, key=lambda file: (file.index != index, -file.index))


def _from_the_ends(
    files: Iterable[ChunkFile],
    worth: Callable[[ChunkFile], tuple[float, float]],
    kept: Callable[[ChunkFile], bool],
    highest: float,
) -> Iterator[ChunkFile]:
    documents: dict[tuple[str, str], list[ChunkFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.index):
        documents[_document(file)].append(file)
    tails = [(worth(chunks[-1]), number, chunks) for number, chunks in enumerate(documents.values())]
    heapq.heapify(tails)
    while tails:
        (frequency, _), number, chunks = heapq.heappop(tails)
        if frequency > highest:
            return
        if kept(chunks[-1]):
            continue
        yield chunks.pop()
        if chunks:
            heapq.heappush(tails, (worth(chunks[-1]), number, chunks))
