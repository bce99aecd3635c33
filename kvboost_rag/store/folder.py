"""What a cache folder holds, over all identities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvboost_rag.store.base import logger
from kvboost_rag.store.chunk_file import read_chunk
from kvboost_rag.store.header import DAMAGE, ChunkFile, read_header
from kvboost_rag.store.layout import chunk_paths

__all__ = ["damaged_files", "read_headers", "verify_files"]


def read_headers(folder: Path) -> Iterator[ChunkFile]:
    """Read every chunk file's header in a folder; damaged ones are logged and passed over."""
    for path in chunk_paths(folder):
        try:
            yield read_header(path)
        except FileNotFoundError:
            continue
        except (OSError, *DAMAGE) as error:
            logger.warning("%s is not a readable chunk file (%s): passed over", path.name, error)


def verify_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Read every chunk file in a folder whole.

    Parameters
    ----------
    folder
        A cache folder.

    Yields
    ------
    tuple[pathlib.Path, str]
        Each file and why it can not be used, empty for a sound one. One that can not be read now may be sound.
    """
    for path in chunk_paths(folder):
        try:
            yield path, _damage(path)
        except FileNotFoundError:
            continue
        except (OSError, MemoryError) as error:
            yield path, f"it can not be read now: {error}"


def damaged_files(folder: Path) -> Iterator[Path]:
    """Read every chunk file in a folder whole, for those that are damaged; unreadable ones are logged instead."""
    for path in chunk_paths(folder):
        try:
            if _damage(path):
                yield path
        except FileNotFoundError:
            continue
        except (OSError, MemoryError) as error:
            logger.warning("%s can not be read now (%s): passed over", path, error)


def _damage(path: Path) -> str:
    """Say what is wrong with a chunk's file, empty for nothing."""
    try:
        read_chunk(path)
    except DAMAGE as error:
        return str(error) or type(error).__name__
    return ""
