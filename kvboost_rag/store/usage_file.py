"""How often chunks were used, kept beside them: a ledger for each identity, which several processes add to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvboost_rag.reading import read_bounded
from kvboost_rag.store.base import logger
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import usage_path
from kvboost_rag.usage import UsageLedger

__all__ = ["Worth", "merge_usage", "read_usage", "usage_with"]

# A ledger remembers 100,000 chunks, each in less than 150 bytes.
_LONGEST = 1 << 24


def merge_usage(path: Path, usage: UsageLedger) -> None:
    """Add what is written in a file, if it is there; a damaged one is logged, and counting begins anew."""
    try:
        usage.merge_json(json.loads(read_bounded(path, _LONGEST)))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is passed over: %s", path, error)


def read_usage(folder: Path, identity: str) -> UsageLedger:
    """Read what is written of an identity's chunks."""
    usage = UsageLedger()
    merge_usage(usage_path(folder, identity), usage)
    return usage


def usage_with(path: Path, delta: dict[str, Any]) -> bytes:
    """Make the content of a file out of what it holds now and a delta, for the holder of the folder's lock."""
    usage = UsageLedger()
    merge_usage(path, usage)
    usage.merge_json(delta)
    return json.dumps(usage.to_json(), separators=(",", ":")).encode()


class Worth:
    """Of a chunk on disk: how often it is retrieved and used, and among equals when it was last read.

    Frequencies are compared over identities, so that no model's chunks push another's out as such.

    Parameters
    ----------
    folder
        The cache folder.
    identity, usage
        Whose usage is at hand; others' is read from the folder when it is asked for.
    """

    def __init__(self, folder: Path, identity: str, usage: UsageLedger | None) -> None:
        self._folder = folder
        self._ledgers = {} if usage is None else {identity: usage}

    def __call__(self, file: ChunkFile) -> tuple[float, float]:
        """Return frequency and last use, in seconds since the epoch."""
        if file.identity not in self._ledgers:
            self._ledgers[file.identity] = read_usage(self._folder, file.identity)
        return self._ledgers[file.identity].frequency(file.key.prefix), file.used
