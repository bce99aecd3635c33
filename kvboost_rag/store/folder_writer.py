"""Writing into a shared cache folder: under its lock, within its budget."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvboost_rag.store.base import logger
from kvboost_rag.store.chunk_file import write_atomically
from kvboost_rag.store.file_index import FileIndex
from kvboost_rag.store.folder_lock import FolderLock
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import WRITING, make_folder, temporary_files
from kvboost_rag.store.room import Order, Room, eviction_order
from kvboost_rag.store.usage_file import Worth
from kvboost_rag.types import ChunkKey
from kvboost_rag.usage import UsageLedger

__all__ = ["FolderWriter"]


class FolderWriter:
    """Writes one identity's files.

    Parameters
    ----------
    folder
        The cache folder.
    index
        Of the identity's files.
    max_bytes
        Budget over everything in the folder; None for no limit.
    usage
        Says which of the identity's chunks are worth keeping; None goes by what is written in the folder.
    """

    def __init__(self, folder: Path, index: FileIndex, max_bytes: int | None, usage: UsageLedger | None) -> None:
        self._folder = folder
        self._identity = index.identity
        self._index = index
        self._usage = usage
        # Bytes of the smallest chunk that the budget can never hold; None until such a one was offered.
        self._too_large: int | None = None
        self._lock = FolderLock(folder)
        self._room = Room(folder, index, max_bytes)

    def open(self) -> None:
        """See that the folder can be written, and remove what killed writers left and what exceeds the budget.

        Raises
        ------
        OSError
            If it can not.
        """
        own = self._folder / self._identity
        with self._held("clearing up") as held, tempfile.TemporaryFile(dir=own, prefix=WRITING):
            if held and not self._room.make(0, self._order(lambda file: False)):
                logger.warning("%s exceeds its budget by what is no chunk; see what else lies there", self._folder)

    @contextmanager
    def _held(self, purpose: str) -> Iterator[bool]:
        """Hold the folder's lock for a block; False (and a log line) if it could not be had in time."""
        # Somebody may have removed the folder.
        make_folder(self._folder)
        own = self._folder / self._identity
        own.mkdir(exist_ok=True)
        if own.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "a link where a folder belongs; remove it", str(own))
        with self._lock.held(purpose) as held:
            if held and not self._lock.is_mine():
                # No writer is alive but this one, so these are what killed ones left.
                for path in temporary_files(self._folder):
                    path.unlink(missing_ok=True)
                self._room.forget()
            yield held

    def write(
        self,
        path: Path,
        content: Callable[[], bytes],
        kept: Callable[[ChunkFile], bool],
        offered: ChunkFile | None = None,
    ) -> bool:
        """Write a file; False (and a log line) if the disk, the budget or another writer does not let it.

        Parameters
        ----------
        path
            Of the file, in the identity's folder.
        content
            Called while no other process writes.
        kept
            Whether a file must not be evicted for it.
        offered
            What the file will be, so that nothing that is used more often is evicted for it; None if that may be.
        """
        try:
            with self._held(f"writing {path.name}") as held:
                return held and self._write(path, content(), self._order(kept, offered))
        except OSError as error:
            logger.warning("%s was not written: %s", path, error)
            return False

    def wants(self, prefix: str, kept: Callable[[ChunkFile], bool]) -> bool:
        """Whether a chunk of the size of the least valuable file would be written; a guess, made without the lock."""
        usual = max((file.nbytes for file in self._index), default=self._too_large or 1)
        try:
            return self._room.has_free(usual) or self._is_worth_more(prefix, kept)
        except OSError as error:
            logger.warning("%s can not be looked through: %s", self._folder, error)
            return False

    def _is_worth_more(self, prefix: str, kept: Callable[[ChunkFile], bool]) -> bool:
        worth = Worth(self._folder, self._identity, self._usage)
        victim = self._room.first_to_go(partial(eviction_order, worth=worth, kept=kept))
        if victim is None:
            return False
        offered = replace(victim, identity=self._identity, key=ChunkKey(prefix, victim.key.content))
        return self._room.has_free(victim.nbytes) or kept(offered) or worth(offered)[0] > worth(victim)[0]

    def _write(self, path: Path, payload: bytes, order: Order) -> bool:
        if not self._room.make(len(payload), order):
            if self._room.can_ever_hold(len(payload)):
                logger.info("%s was not written: what is there is worth more, or must stay", path)
            else:
                self._too_large = min(len(payload), self._too_large or len(payload))
                logger.warning("%s was not written: there is no room for %d bytes in the budget", path, len(payload))
            return False
        # Before it is written: should that fail, the count is too high rather than too low.
        self._room.added(len(payload))
        write_atomically(path, payload)
        return True

    def _order(self, kept: Callable[[ChunkFile], bool], offered: ChunkFile | None = None) -> Order:
        worth = Worth(self._folder, self._identity, self._usage)
        return partial(eviction_order, worth=worth, kept=kept, offered=offered)
