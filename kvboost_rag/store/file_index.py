"""Which files of one identity there are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvboost_rag.store.base import logger
from kvboost_rag.store.header import DAMAGE, ChunkFile, read_header
from kvboost_rag.store.layout import chunk_path, is_name, prefix_of

__all__ = ["FileIndex"]

# Clocks of file systems tick: a folder that changed just now may change again within the same tick.
_TICK_SECONDS = 0.05

_Read = TypeVar("_Read")
_Signature = tuple[int, int, int]


class FileIndex:
    """The usable files of one identity as far as they were seen; other processes add and remove files at any time.

    Safe to use from several threads. Nothing here writes.

    Parameters
    ----------
    folder, identity
        The cache folder and whose files are meant.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self.identity = identity
        self._guard = threading.RLock()
        self._files: dict[str, ChunkFile] = {}
        self._by_content: dict[str, dict[str, None]] = {}
        self._by_document: dict[str, dict[str, None]] = {}
        # Damaged files, each under what tells it from one that replaces it.
        self._damaged: dict[str, _Signature] = {}
        self._seen: int | None = None

    def lookup(self, prefix: str) -> ChunkFile | None:
        """Return a chunk's file if it is there now and its header is right, whoever wrote it."""
        with self._guard:
            known = self._files.get(prefix)
        if known is not None and (signature := _signature(known.path)) and signature[1] == known.nbytes:
            return known
        return self._discovered(prefix)

    def _discovered(self, prefix: str) -> ChunkFile | None:
        file = self.tried(prefix, read_header)
        if file is not None:
            self.add(file)
        return file

    def tried(self, prefix: str, read: Callable[[Path], _Read]) -> _Read | None:
        """Return what ``read`` makes of a chunk's file.

        A file that is gone is None; one that ``read`` raises :data:`DAMAGE` for is None too, is logged, and is not
        tried again before it was replaced. One that can not be read now, as when the process has too many files open,
        is None and logged this time.
        """
        path = chunk_path(self._folder, self.identity, prefix)
        signature = _signature(path) if is_name(prefix) else None
        if signature is None or self._damaged.get(prefix) == signature:
            self.remove(prefix)
            return None
        try:
            return read(path)
        except FileNotFoundError:
            self.remove(prefix)
            return None
        except (OSError, MemoryError) as error:
            logger.warning("%s can not be read now (%s): treated as a miss", path.name, error)
            return None
        except DAMAGE as error:
            logger.warning("%s can not be used (%s): treated as a miss", path.name, error)
            with self._guard:
                self.remove(prefix)
                self._damaged[prefix] = signature
            return None

    def add(self, file: ChunkFile) -> None:
        """Take a file in; one with the same prefix key is replaced."""
        with self._guard:
            self.remove(file.key.prefix)
            self._damaged.pop(file.key.prefix, None)
            self._files[file.key.prefix] = file
            self._by_content.setdefault(file.key.content, {})[file.key.prefix] = None
            self._by_document.setdefault(file.document_id, {})[file.key.prefix] = None

    def remove(self, prefix: str) -> None:
        """Leave a file out; nothing happens if it is not known."""
        with self._guard:
            file = self._files.pop(prefix, None)
            if file is None:
                return
            for names, name in ((self._by_content, file.key.content), (self._by_document, file.document_id)):
                names[name].pop(prefix, None)
                if not names[name]:
                    del names[name]

    def refresh(self) -> bool:
        """Take in what other processes changed; False if the folder is as it was."""
        own = self._folder / self.identity
        changed = _changed(own)
        if changed is not None and changed == self._seen:
            return False
        names = _names(own)
        if names is None:
            return False
        there = {prefix for name in names if (prefix := prefix_of(name)) is not None}
        with self._guard:
            gone = self._files.keys() - there
            new = there - self._files.keys()
            self._damaged = {prefix: s for prefix, s in self._damaged.items() if prefix in there}
        for prefix in gone:
            self.remove(prefix)
        for prefix in sorted(new):
            self._discovered(prefix)
        # What could not be read this time is to be found the next time, though nothing changes in the folder.
        all_read = all(prefix in self._files or prefix in self._damaged for prefix in new)
        settled = all_read and changed is not None and abs(time.time() - changed / 1e9) > _TICK_SECONDS
        self._seen = changed if settled else None
        return True

    def with_content(self, content: str) -> list[str]:
        """Prefix keys of the files with a content key."""
        with self._guard:
            return list(self._by_content.get(content, ()))

    def of_document(self, document_id: str) -> list[ChunkFile]:
        """Files that were written for a document."""
        with self._guard:
            return [self._files[prefix] for prefix in self._by_document.get(document_id, ())]

    def current(self) -> Iterator[ChunkFile]:
        """Iterate over the files with their last use as of now; vanished ones are left out."""
        for file in self:
            try:
                stat = file.path.stat()
            except FileNotFoundError:
                continue
            yield replace(file, nbytes=stat.st_size, used=stat.st_mtime)

    def damaged(self) -> Iterator[tuple[Path, int]]:
        """Iterate over files that lie where a chunk's file belongs and are none, with their bytes."""
        with self._guard:
            found = [(chunk_path(self._folder, self.identity, p), s[1]) for p, s in self._damaged.items()]
        return ((path, nbytes) for path, nbytes in found if path.is_file())

    def __iter__(self) -> Iterator[ChunkFile]:
        """Iterate over the files as they were last seen."""
        with self._guard:
            return iter(list(self._files.values()))

    def __len__(self) -> int:
        """Count the files as they were last seen."""
        return len(self._files)


def _signature(path: Path) -> _Signature | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s can not be seen: %s", path, error)
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _changed(folder: Path) -> int | None:
    """When names in a folder last changed, in nanoseconds; None if it can not be told."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _names(folder: Path) -> list[str] | None:
    """List a folder, empty if it is gone; None, and a log line, if that can not be told."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s can not be listed: %s", folder, error)
        return None
