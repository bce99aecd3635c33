"""The header of a chunk's file: safetensors metadata that say what it is, read without trusting them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from kvboost_rag.reading import open_regular
from kvboost_rag.store.layout import prefix_of
from kvboost_rag.types import ChunkKey

__all__ = ["DAMAGE", "FORMAT", "LONGEST_HEADER", "ChunkFile", "described", "metadata_of", "place_of", "read_header"]

FORMAT = "kvboost_rag chunk 3"
"""Raised whenever files would be read differently."""

DAMAGE = (SafetensorError, ArithmeticError, LookupError, ValueError, TypeError, RuntimeError, AssertionError)
"""What reading a file raises that is not what it should be; an OSError says nothing about what is in the file."""

LONGEST_HEADER = 1 << 20
"""Bytes of a header; those of chunks have less than a thousandth of it."""

_COUNTS = 1 << 31


@dataclass(frozen=True)
class ChunkFile:
    """What the header of one file says, and the file system.

    Parameters
    ----------
    path
        Of the file.
    identity
        Of the model, the canonical context and the KV's dtype.
    key, document_id, index
        Of the chunk, see :class:`kvboost_rag.types.Chunk`.
    tokens
        How many the chunk has.
    nbytes
        Size of the file.
    used
        When it was last read or written, in seconds since the epoch.
    """

    path: Path
    identity: str
    key: ChunkKey
    document_id: str
    index: int
    tokens: int
    nbytes: int
    used: float


def read_header(path: Path) -> ChunkFile:
    """Read what a file says of itself, and see that it lies where it belongs and is as long as it says.

    Raises
    ------
    DAMAGE
        If the file can not be used.
    OSError
        If it can not be read now.
    """
    with open_regular(path) as file:
        return described(path, file, metadata_of(file, os.fstat(file.fileno()).st_size))


def metadata_of(file: BinaryIO, size: int) -> dict[str, str]:
    """Read the header of an open safetensors file (its length in 8 bytes, then JSON) for its metadata.

    Parameters
    ----------
    file
        At its beginning.
    size
        Bytes of it all.

    Raises
    ------
    DAMAGE
        If it is no header of a chunk's file, or another file's.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, LONGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes")
    header: Any = json.loads(file.read(length), object_pairs_hook=_without_twins)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    meta = header.pop("__metadata__")
    if not isinstance(meta, dict) or not all(isinstance(text, str) for text in meta.values()):
        raise ValueError("its metadata are not texts by name")
    end = 8 + length + max(tensor["data_offsets"][1] for tensor in header.values())
    if end != size:
        raise ValueError(f"it has {size} bytes, not {end}")
    if meta["format"] != FORMAT:
        raise ValueError(f"its format is {meta['format']!r}, not {FORMAT!r}")
    return meta


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that comes twice: two readers may take different ones."""
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a name comes twice in its header")
    return named


def described(path: Path, file: BinaryIO, meta: Mapping[str, str]) -> ChunkFile:
    """Make of an open file's metadata what they say; raises as :func:`read_header` does."""
    key, index, tokens = place_of(meta, path.parent.name, prefix_of(path.name))
    stat = os.fstat(file.fileno())
    return ChunkFile(
        path, meta["identity"], key, meta["document_id"], index, tokens,
        stat.st_size, stat.st_mtime,
    )  # fmt: skip


def place_of(meta: Mapping[str, str], identity: str, prefix: str | None) -> tuple[ChunkKey, int, int]:
    """Read key, index in the document and tokens of a chunk from its metadata.

    Raises
    ------
    DAMAGE
        If they are none, or those of a chunk that does not belong under this identity and prefix key.
    """
    if (meta["identity"], meta["prefix"]) != (identity, prefix):
        raise ValueError(f"it belongs at {meta['identity']!r}/{meta['prefix']!r}")
    index, tokens = int(meta["index"]), int(meta["tokens"])
    if not (0 <= index < _COUNTS and 0 < tokens < _COUNTS):
        raise ValueError(f"it would be chunk {index} of a document, with {tokens} tokens")
    return ChunkKey(meta["prefix"], meta["content"]), index, tokens
