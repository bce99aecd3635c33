"""One chunk's file: a safetensors file whose metadata say what it is.

Files are read, never mapped: a mapped file that shrinks, or lies on a bad block, ends the process with SIGBUS, and its
bytes could change between the check and the use. What is served is a copy, and the copy is what was checked.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvboost_rag.store.base import logger
from kvboost_rag.store.codec import entry_of, tensors_of
from kvboost_rag.store.layout import WRITING, prefix_of
from kvboost_rag.types import ChunkKey, ChunkKV

__all__ = [
    "DAMAGE", "FORMAT", "ChunkFile", "checksum", "read_chunk", "read_header", "serialise", "touch", "write_atomically",
]  # fmt: skip

FORMAT = "kvboost_rag chunk 3"
"""Raised whenever files would be read differently."""

DAMAGE = (SafetensorError, ArithmeticError, LookupError, ValueError, TypeError, RuntimeError, AssertionError)
"""What reading a file raises that is not what it should be; an OSError says nothing about what is in the file."""

_LONGEST_HEADER = 1 << 20


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


def serialise(entry: ChunkKV, identity: str) -> bytes:
    """Make the content of a chunk's file."""
    chunk, tensors = entry.chunk, tensors_of(entry)
    meta = {
        "format": FORMAT,
        "identity": identity,
        "prefix": chunk.key.prefix,
        "content": chunk.key.content,
        "document_id": chunk.document_id,
        "index": str(chunk.index),
        "tokens": str(len(chunk.token_ids)),
    }
    return save(tensors, metadata={**meta, "checksum": checksum(meta, tensors)})


def checksum(meta: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of everything that is served: 32 hexadecimal digits; metadata called ``checksum`` do not count."""
    digest = xxhash.xxh3_128()
    named = sorted((name, text) for name, text in meta.items() if name != "checksum")
    digest.update(json.dumps(named).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_atomically(path: Path, payload: bytes) -> None:
    """Write a file so that it is there, whole and on the medium, or not at all.

    Raises
    ------
    OSError
        If the disk refuses; nothing is left then.
    """
    # Not made by tempfile, whose files only their owner may read.
    temporary = path.with_name(f"{WRITING}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the medium, where folders can be opened for that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def touch(path: Path) -> None:
    """Take down that a file is used now, which eviction goes by."""
    try:
        os.utime(path)
    except OSError as error:
        logger.info("%s: its use could not be taken down: %s", path.name, error)


def read_header(path: Path) -> ChunkFile:
    """Read what a file says of itself, and see that it lies where it belongs and is as long as it says.

    Raises
    ------
    DAMAGE
        If the file can not be used.
    OSError
        If it can not be read now.
    """
    with path.open("rb") as file:
        return _described(path, file, _metadata(file))


def read_chunk(path: Path) -> tuple[ChunkFile, ChunkKV]:
    """Read a chunk and check it against its checksum.

    Raises
    ------
    DAMAGE
        If the file can not be used.
    OSError
        If it can not be read now.
    """
    with path.open("rb") as file:
        meta = _metadata(file)
        described = _described(path, file, meta)
        file.seek(0)
        tensors = load(file.read(described.nbytes))
    if meta["checksum"] != checksum(meta, tensors):
        raise ValueError("its checksum does not match")
    return described, entry_of(described.key, described.document_id, described.index, tensors)


def _metadata(file: BinaryIO) -> dict[str, str]:
    """Read the header of an open safetensors file: its length in 8 bytes, then JSON."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes")
    header: Any = json.loads(file.read(length))
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


def _described(path: Path, file: BinaryIO, meta: Mapping[str, str]) -> ChunkFile:
    if (meta["identity"], meta["prefix"]) != (path.parent.name, prefix_of(path.name)):
        raise ValueError(f"it belongs at {meta['identity']!r}/{meta['prefix']!r}")
    key = ChunkKey(meta["prefix"], meta["content"])
    stat = os.fstat(file.fileno())
    return ChunkFile(
        path, meta["identity"], key, meta["document_id"], int(meta["index"]), int(meta["tokens"]),
        stat.st_size, stat.st_mtime,
    )  # fmt: skip
