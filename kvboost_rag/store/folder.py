"""What a cache folder holds, over all identities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvboost_rag.store.base import logger
from kvboost_rag.store.chunk_file import DAMAGE, ChunkFile, read_chunk, read_header
from kvboost_rag.store.layout import chunk_paths

__all__ = ["read_headers", "verify_files"]


def read_headers(folder: Path) -> Iterator[ChunkFile]:
    """Read every chunk file's header in a folder; damaged ones are logged and passed over."""
    for path in chunk_paths(folder):
        try:
            yield read_header(path)
        except FileNotFoundError:
            continue
        except DAMAGE as error:
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
        Each file and why it can not be used, empty for a sound one.
    """
    for path in chunk_paths(folder):
        try:
            read_chunk(path)
        except FileNotFoundError:
            continue
        except DAMAGE as error:
            yield path, str(error) or type(error).__name__
        else:
            yield path, ""
