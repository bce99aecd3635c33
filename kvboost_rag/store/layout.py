"""Names inside a cache folder.

::

    folder/.lock                              taken for writing and evicting
    folder/.writer                            who held the lock last
    folder/IDENTITY/PREFIX.kv.safetensors     one chunk
    folder/IDENTITY/usage.json                how often the chunks were used
    folder/IDENTITY/.writing-...              a file that is not whole yet
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "LOCK",
    "WRITER",
    "WRITING",
    "chunk_path",
    "chunk_paths",
    "folder_bytes",
    "identity_folders",
    "is_name",
    "make_folder",
    "prefix_of",
    "stale_files",
    "temporary_files",
    "usage_path",
]

LOCK, WRITER, WRITING = ".lock", ".writer", ".writing-"
_SUFFIX = ".kv.safetensors"
_NAME = re.compile(r"[0-9A-Za-z_-]{1,120}")


def is_name(text: str) -> bool:
    """Whether a key or identity may be part of a path: letters, digits, ``_`` and ``-`` only."""
    return _NAME.fullmatch(text) is not None


def make_folder(folder: Path) -> None:
    """Make a cache folder where none is; only its owner may enter a new one, since it holds what documents say.

    Raises
    ------
    OSError
        If it can not be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def chunk_path(folder: Path, identity: str, prefix: str) -> Path:
    """Where a chunk's file is."""
    return folder / identity / f"{prefix}{_SUFFIX}"


def prefix_of(name: str) -> str | None:
    """Prefix key of a chunk's file by its name; None for other files."""
    prefix = name.removesuffix(_SUFFIX)
    return prefix if prefix != name and is_name(prefix) else None


def usage_path(folder: Path, identity: str) -> Path:
    """Where the usage of an identity's chunks is kept."""
    return folder / identity / "usage.json"


def identity_folders(folder: Path) -> list[Path]:
    """List the folders of all identities, sorted; none if the folder is gone."""
    try:
        with os.scandir(folder) as found:
            # What a link leads to is not for us to list, or to remove files from.
            own = (entry for entry in found if is_name(entry.name) and entry.is_dir(follow_symlinks=False))
            return sorted(Path(entry.path) for entry in own)
    except FileNotFoundError:
        return []


def chunk_paths(folder: Path) -> Iterator[Path]:
    """Iterate over the chunk files of all identities, sorted."""
    for own in identity_folders(folder):
        yield from sorted(path for path in own.iterdir() if prefix_of(path.name) is not None)


def temporary_files(folder: Path) -> Iterator[Path]:
    """Iterate over what writers have begun and not finished."""
    for own in identity_folders(folder):
        yield from own.glob(f"{WRITING}*")


def stale_files(folder: Path) -> list[Path]:
    """List the files that earlier releases left in a folder and nothing reads any more.

    Parameters
    ----------
    folder
        A cache folder.

    Returns
    -------
    list[Path]
        Chunk and temporary files right in the folder, sorted; removing them loses nothing.
    """
    return sorted([*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"{WRITING}*")])


def folder_bytes(folder: Path) -> int:
    """Bytes of everything under a folder; what vanishes meanwhile counts as nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total
