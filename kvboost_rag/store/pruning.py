"""Taking out of a cache folder what is of no use."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from kvboost_rag.store.base import logger
from kvboost_rag.store.file_index import FileIndex
from kvboost_rag.store.folder import damaged_files
from kvboost_rag.store.folder_lock import FolderLock
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import LOCK, WRITER, chunk_paths, stale_files, temporary_files
from kvboost_rag.store.room import Room, eviction_order
from kvboost_rag.store.usage_file import Worth

__all__ = ["prune_folder"]

# No identity has this name: all files are looked at alike.
_NOBODY = "-"


def prune_folder(folder: Path, max_bytes: int | None = None) -> list[Path]:
    """Remove damaged and left-over files, then the least valuable chunks until a budget is kept.

    Parameters
    ----------
    folder
        A cache folder; engines may be using it.
    max_bytes
        Budget over everything in the folder; None removes no sound chunk.

    Returns
    -------
    list[Path]
        What was removed.

    Raises
    ------
    ValueError
        If it is no cache folder, another process keeps it locked, or it can not be written.
    """
    try:
        _check_is_cache(folder)
        with FolderLock(folder).held("pruning") as held:
            if not held:
                raise ValueError(f"{folder} is being written by another process; try again when that is done")
            before = {*chunk_paths(folder), *stale_files(folder), *temporary_files(folder)}
            for path in (*damaged_files(folder), *stale_files(folder), *temporary_files(folder)):
                path.unlink(missing_ok=True)
            _shrink(folder, max_bytes)
            return sorted(path for path in before if not os.path.lexists(path))
    except OSError as error:
        raise ValueError(f"{folder} can not be pruned ({error}); make it writable") from error


def _check_is_cache(folder: Path) -> None:
    """See that a store was here, before anything is removed that another program's names may look like."""
    if (folder / LOCK).exists() or (folder / WRITER).exists() or any(chunk_paths(folder)):
        return
    raise ValueError(f"{folder} is no cache folder, so nothing was removed; give the one that an engine was given")


def _shrink(folder: Path, max_bytes: int | None) -> None:
    order = partial(eviction_order, worth=Worth(folder, _NOBODY, None), kept=_nothing_stays)
    if not Room(folder, FileIndex(folder, _NOBODY), max_bytes).make(0, order):
        logger.warning("%s holds more than %s bytes besides chunks", folder, max_bytes)


def _nothing_stays(file: ChunkFile) -> bool:
    return False
