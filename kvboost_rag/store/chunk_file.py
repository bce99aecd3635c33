"""One chunk's file: a safetensors file whose metadata say what it is.

Files are read, never mapped: a mapped file that shrinks, or lies on a bad block, ends the process with SIGBUS, and its
bytes could change between the check and the use. What is served is a copy, and the copy is what was checked.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor

from kvboost_rag.owner import Owner
from kvboost_rag.reading import open_regular
from kvboost_rag.store.base import logger
from kvboost_rag.store.codec import entry_of, tensors_of
from kvboost_rag.store.header import FORMAT, LONGEST_HEADER, ChunkFile, described, metadata_of, place_of
from kvboost_rag.store.layout import WRITING
from kvboost_rag.types import ChunkKey, ChunkKV

__all__ = ["checksum", "parse_chunk", "read_chunk", "serialise", "touch", "write_atomically"]


def serialise(entry: ChunkKV, identity: str, owner: Owner | None = None) -> bytes:
    """Make the content of a chunk's file, which the owner signs if there is one."""
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
    if owner is not None:
        meta["mac"] = owner.mac(_frames(meta, tensors))
    return save(tensors, metadata={**meta, "checksum": checksum(meta, tensors)})


def checksum(meta: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of everything that is served: 32 hexadecimal digits; metadata called ``checksum`` do not count."""
    digest = xxhash.xxh3_128()
    for frame in _frames({name: text for name, text in meta.items() if name != "checksum"}, tensors):
        digest.update(frame)
    return digest.hexdigest()


def _frames(meta: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Bytes of all that is served, in an order that the names decide."""
    yield json.dumps(sorted(meta.items())).encode()
    for name in sorted(tensors):
        tensor = tensors[name]
        yield f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


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


def read_chunk(
    path: Path, owner: Owner | None = None, max_bytes: int | None = None
) -> tuple[ChunkFile, ChunkKV]:
    """Read a chunk and check it against its checksum, or against the owner's signature.

    Parameters
    ----------
    path
        Of the file.
    owner
        Who must have signed it; None takes anybody's.
    max_bytes
        Largest tensors, all together, that memory is taken for; None for no limit.

    Raises
    ------
    DAMAGE
        If the file can not be used.
    OSError
        If it can not be read now.
    """
    with open_regular(path) as file:
        meta = metadata_of(file, os.fstat(file.fileno()).st_size)
        told = described(path, file, meta)
        if max_bytes is not None and told.nbytes > LONGEST_HEADER + max_bytes:
            raise ValueError(f"it has {told.nbytes} bytes, more than the chunk can take")
        file.seek(0)
        payload = file.read(told.nbytes)
    return told, _entry(payload, meta, (told.key, told.index, told.tokens), owner)


def parse_chunk(payload: bytes, identity: str, prefix: str, owner: Owner | None = None) -> ChunkKV:
    """Make a chunk of what :func:`serialise` made, and check it as :func:`read_chunk` does.

    Parameters
    ----------
    payload
        The content of a chunk's file, from wherever.
    identity, prefix
        Where it was found.
    owner
        Who must have signed it; None takes anybody's.

    Raises
    ------
    DAMAGE
        If it can not be used.
    """
    meta = metadata_of(io.BytesIO(payload), len(payload))
    return _entry(payload, meta, place_of(meta, identity, prefix), owner)


def _entry(payload: bytes, meta: Mapping[str, str], place: tuple[ChunkKey, int, int], owner: Owner | None) -> ChunkKV:
    key, index, tokens = place
    tensors = load(payload)
    _verify(meta, tensors, owner)
    entry = entry_of(key, meta["document_id"], index, tensors)
    if len(entry.chunk.token_ids) != tokens:
        raise ValueError(f"it has {len(entry.chunk.token_ids)} tokens, not {tokens}")
    return entry


def _verify(meta: Mapping[str, str], tensors: Mapping[str, Tensor], owner: Owner | None) -> None:
    if owner is None:
        if meta["checksum"] != checksum(meta, tensors):
            raise ValueError("its checksum does not match")
        return
    # The signature covers what the checksum does; without it anybody could have made the checksum.
    signed = {name: text for name, text in meta.items() if name not in ("checksum", "mac")}
    if not owner.vouches(_frames(signed, tensors), meta.get("mac", "")):
        raise ValueError("it was not signed with the owner's secret")
