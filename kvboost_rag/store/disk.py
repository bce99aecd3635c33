"""Chunks on disk: one safetensors file each, written atomically, checked on every read."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvboost_rag.store.base import ChunkStore, logger, same_tokens
from kvboost_rag.store.codec import check_entry, entry_of, tensors_of
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds

__all__ = ["ChunkFile", "DiskStore", "read_headers"]

_SUFFIX = ".kv.safetensors"
_WRITING = ".writing-"
_STALE_SECONDS = 3600.0
_DAMAGE = (OSError, SafetensorError, KeyError, ValueError, RuntimeError)


@dataclass(frozen=True)
class ChunkFile:
    """What the header of one file says."""

    path: Path
    fingerprint: str
    key: ChunkKey
    document_id: str
    index: int
    tokens: int
    nbytes: int


class DiskStore(ChunkStore):
    """Keep chunks in a folder that several processes may share.

    Parameters
    ----------
    folder
        Created if missing.
    fingerprint
        Only entries with this fingerprint are seen; others may live in the same folder.
    shape, dtype
        Layers, key-value heads and head dimension of the model's KV, and its dtype; anything else is damaged.

    Raises
    ------
    ValueError
        If the folder can not be created or written.
    """

    def __init__(self, folder: Path, fingerprint: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"cache folder {folder} can not be used ({error}); give a writable folder") from error
        _remove_stale(folder)
        self._folder = folder
        self._fingerprint = fingerprint
        self._shape = shape
        self._dtype = dtype
        self._files: dict[str, ChunkFile] = {}
        self._by_content: dict[str, dict[str, None]] = {}
        self._by_document: dict[str, dict[str, None]] = {}
        for file in read_headers(folder):
            if file.fingerprint == fingerprint:
                self._index(file)

    def _index(self, file: ChunkFile) -> None:
        self._files[file.key.prefix] = file
        self._by_content.setdefault(file.key.content, {})[file.key.prefix] = None
        self._by_document.setdefault(file.document_id, {})[file.key.prefix] = None

    def put(self, entry: ChunkKV) -> bool:
        """Write a chunk under a temporary name and rename it; False (and a log line) if the disk refuses."""
        if entry.chunk.key.prefix in self._files:
            return True
        path = self._folder / f"{entry.chunk.key.prefix}{_SUFFIX}"
        try:
            _write_atomically(path, _serialise(entry, self._fingerprint))
            file = _chunk_file(path, entry, self._fingerprint)
        except OSError as error:
            logger.warning("chunk %s was not written to disk: %s", entry.chunk.key.prefix, error)
            return False
        self._index(file)
        return True

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read and check a chunk."""
        file = self._files.get(prefix)
        if file is None:
            return None
        try:
            entry = _read(file)
            check_entry(entry, self._shape, self._dtype)
        except _DAMAGE as error:
            logger.warning("%s can not be used (%s): treated as a miss", file.path.name, error)
            self._forget(file.key)
            return None
        return entry if same_tokens(entry, token_ids) else None

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read the first chunk with this content key."""
        for prefix in list(self._by_content.get(content, ())):
            entry = self.get(prefix, token_ids)
            if entry is not None:
                return entry
        return None

    def delete(self, key: ChunkKey) -> None:
        """Remove a chunk's file."""
        file = self._files.get(key.prefix)
        if file is None:
            return
        self._forget(key)
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed: %s", file.path.name, error)

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:
        """Remove the files of a document's earlier versions."""
        for prefix in list(self._by_document.get(document_id, ())):
            if not is_used(prefix):
                self.delete(self._files[prefix].key)

    def _forget(self, key: ChunkKey) -> None:
        file = self._files.pop(key.prefix)
        for index, name in ((self._by_content, key.content), (self._by_document, file.document_id)):
            index[name].pop(key.prefix, None)
            if not index[name]:
                del index[name]

    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is indexed."""
        return prefix in self._files

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys."""
        return iter(list(self._files))

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of this fingerprint."""
        return sum(file.nbytes for file in self._files.values())


def read_headers(folder: Path) -> Iterator[ChunkFile]:
    """Read every chunk file's header in a folder; damaged ones are logged and passed over."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
            key = ChunkKey(meta["prefix"], meta["content"])
            yield ChunkFile(
                path, meta["fingerprint"], key, meta["document_id"], int(meta["index"]), int(meta["tokens"]),
                path.stat().st_size,
            )
        except _DAMAGE as error:
            logger.warning("%s is not a readable chunk file (%s): passed over", path.name, error)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left half written; a living one renames its file within seconds."""
    for path in folder.glob(f"{_WRITING}*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _chunk_file(path: Path, entry: ChunkKV, fingerprint: str) -> ChunkFile:
    chunk = entry.chunk
    return ChunkFile(
        path, fingerprint, chunk.key, chunk.document_id, chunk.index, len(chunk.token_ids), path.stat().st_size
    )


def _serialise(entry: ChunkKV, fingerprint: str) -> bytes:
    chunk = entry.chunk
    tensors = tensors_of(entry)
    meta = {
        "fingerprint": fingerprint,
        "prefix": chunk.key.prefix,
        "content": chunk.key.content,
        "document_id": chunk.document_id,
        "index": str(chunk.index),
        "tokens": str(len(chunk.token_ids)),
        "checksum": _checksum(tensors),
    }
    return save(tensors, metadata=meta)


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_atomically(path: Path, payload: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_WRITING)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(file: ChunkFile) -> ChunkKV:
    with safe_open(file.path, framework="pt") as opened:
        meta = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    if meta.get("checksum") != _checksum(tensors):
        raise ValueError("its checksum does not match")
    if (meta["prefix"], meta["content"], meta["fingerprint"]) != (file.key.prefix, file.key.content, file.fingerprint):
        raise ValueError("its header changed")
    return entry_of(file.key, file.document_id, file.index, tensors)
