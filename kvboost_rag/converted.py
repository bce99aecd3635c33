"""Converted copies of GGUF checkpoints, kept in a folder because converting takes tens of seconds."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash
from safetensors import SafetensorError

__all__ = ["cache_root", "damage", "discard", "file_digest", "keep", "remove_stale"]

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_STALE_SECONDS = 3600.0
_READ_BYTES = 1 << 22


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of the converted copies; nothing is created.

    Parameters
    ----------
    cache_dir
        Cache folder of the caller. None means ``$KVBOOST_CACHE_DIR``, and without that the user's cache folder on
        this platform with ``kvboost_rag`` appended.

    Returns
    -------
    Path
        The sub-folder ``models`` of that folder.
    """
    chosen = cache_dir or os.environ.get("KVBOOST_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else _user_cache() / "kvboost_rag") / "models"


def file_digest(path: Path) -> str:
    """Digest a file's content with xxh3-128; 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def damage(folder: Path) -> str | None:
    """Say what is wrong with a kept copy, after reading every byte of it; None if nothing is.

    Parameters
    ----------
    folder
        An existing folder that :func:`keep` wrote.
    """
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        found = _contents(folder)
    except (OSError, ValueError) as error:
        return f"its manifest or a file can not be read ({error})"
    if not isinstance(expected, dict):
        return "its manifest is not a table of files"
    if expected == found:
        return None
    names = expected.keys() | found.keys()
    return f"changed since it was written: {', '.join(sorted(n for n in names if expected.get(n) != found.get(n)))}"


def keep(folder: Path, save: Callable[[Path], None]) -> bool:
    """Write a copy so that ``folder`` is either absent or complete at any moment.

    Parameters
    ----------
    folder
        Where the copy goes. A complete copy that is there already wins: another process that converted the same file
        has written the same.
    save
        Writes the copy's files into the folder it is given.

    Returns
    -------
    bool
        Whether ``folder`` holds a complete copy now. If not, the log says why.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=folder.name + _PARTIAL, dir=folder.parent))
    except OSError as error:
        logger.warning("the converted copy is not kept: %s can not be written (%s)", folder.parent, error)
        return False
    try:
        return _fill_and_rename(partial, folder, save)
    except (OSError, SafetensorError) as error:
        logger.warning("the converted copy is not kept: writing %s failed (%s)", folder, error)
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a copy; where that is not allowed, the log says so."""
    try:
        # Renamed first, so that no other process ever opens a half-deleted copy.
        doomed = Path(tempfile.mkdtemp(prefix=folder.name + _PARTIAL, dir=folder.parent))
        folder.rename(doomed / folder.name)
    except OSError as error:
        logger.warning("the copy %s can not be removed (%s)", folder, error)
        return
    shutil.rmtree(doomed, ignore_errors=True)


def remove_stale(root: Path) -> None:
    """Delete what interrupted conversions left in ``root`` an hour ago or earlier.

    Younger leftovers stay, because another process may be writing them.
    """
    for partial in root.glob(f"*{_PARTIAL}*"):
        if time.time() - _last_write(partial) > _STALE_SECONDS:
            logger.info("removing what an interrupted conversion left: %s", partial)
            shutil.rmtree(partial, ignore_errors=True)


def _fill_and_rename(partial: Path, folder: Path, save: Callable[[Path], None]) -> bool:
    save(partial)
    (partial / _MANIFEST).write_text(json.dumps(_contents(partial), indent=1), encoding="utf-8")
    try:
        partial.rename(folder)
    except OSError:
        # Renaming onto a folder with files fails: either another process was faster, or something is wrong.
        if not folder.is_dir() or damage(folder) is not None:
            raise
    return True


def _contents(folder: Path) -> dict[str, list[int | str]]:
    """Size in bytes and digest of every file but the manifest, by name."""
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    return {path.name: [path.stat().st_size, file_digest(path)] for path in files}


def _last_write(folder: Path) -> float:
    """Seconds since the epoch; now, if the folder vanishes meanwhile."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
