"""Chunks on disk, in a folder that several processes may share."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from kvboost_rag.owner import Owner
from kvboost_rag.store.base import ChunkStore, logger, same_tokens
from kvboost_rag.store.chunk_file import read_chunk, serialise, touch
from kvboost_rag.store.codec import check_entry, most_bytes
from kvboost_rag.store.file_index import FileIndex
from kvboost_rag.store.folder_writer import FolderWriter
from kvboost_rag.store.header import ChunkFile
from kvboost_rag.store.layout import chunk_path, is_name, usage_path
from kvboost_rag.store.usage_file import merge_usage, usage_with
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds
from kvboost_rag.usage import Event, UsageLedger

__all__ = ["DiskStore"]

# Eviction asks when a file was last used; a minute more or less does not matter to it.
_TOUCH_SECONDS = 60.0


class DiskStore(ChunkStore):
    """Keep chunks in a folder, one file each.

    A chunk that was put is on the medium when :meth:`put` returns, whole, and stays until it is deleted or evicted by
    this or another process; nothing is evicted for a chunk that is used less often. Safe to use from several threads
    and processes; readers take no lock.

    Parameters
    ----------
    folder
        Created if missing.
    identity
        Of the model, the canonical context and the KV's dtype: only entries of this identity are seen, others may live
        in the same folder. Letters, digits, ``_`` and ``-``.
    shape, dtype
        Layers, key-value heads and head dimension of the model's KV, and its dtype; anything else is damaged.
    max_bytes
        Budget over everything in the folder, other identities' files included; None for no limit.
    read_only
        Whether nothing at all is written, removed or touched.
    usage
        Gets what earlier processes counted; what it counts itself is added to the folder by :meth:`flush` and
        :meth:`close`. What is used rarely is evicted first. None counts nothing.
    owner
        Who signs what is written, and must have signed what is read; None takes anybody's files.

    Raises
    ------
    ValueError
        If the folder can not be used.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        max_bytes: int | None = None,
        read_only: bool = False,
        usage: UsageLedger | None = None,
        owner: Owner | None = None,
    ) -> None:
        if not is_name(identity):
            raise ValueError(f"identity {identity!r} can not name a folder; use letters, digits, _ and - alone")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give a positive number of bytes, or None for no limit")
        self._folder = folder
        self._identity = identity
        self._shape = shape
        self._dtype = dtype
        self._usage = usage
        self._owner = owner
        self._guard = threading.Lock()
        self._pins: Counter[str] = Counter()
        # Deleted, but the file could not be removed.
        self._hidden: set[str] = set()
        self._index = FileIndex(folder, identity)
        self._writer = None if read_only else FolderWriter(folder, self._index, max_bytes, usage)
        self._open()

    def _open(self) -> None:
        try:
            if self._writer is None:
                os.listdir(self._folder)
            else:
                self._writer.open()
        except OSError as error:
            remedy = "a readable one" if self._writer is None else "a writable one, or read_only=True to read alone"
            raise ValueError(f"cache folder {self._folder} can not be used ({error}); give {remedy}") from error
        self._index.refresh()
        if self._usage is not None:
            merge_usage(usage_path(self._folder, self._identity), self._usage)

    def put(self, entry: ChunkKV) -> bool:
        """Write a chunk; False (and a log line) if the disk, the budget or another writer does not let it."""
        prefix = entry.chunk.key.prefix
        if not is_name(prefix):
            raise ValueError(f"prefix key {prefix!r} can not name a file; use letters, digits, _ and - alone")
        if self._writer is None:
            return False
        self._hidden.discard(prefix)
        if self._index.lookup(prefix) is not None:
            return True
        path = chunk_path(self._folder, self._identity, prefix)
        payload = serialise(entry, self._identity, self._owner)
        offered = self._described(path, entry, len(payload))
        written = self._writer.write(path, lambda: payload, self._is_pinned, offered)
        return written and self._index.lookup(prefix) is not None

    def wants(self, prefix: str) -> bool:
        """Whether a chunk of the size of the least valuable file has room, or is used more often than that one."""
        return self._writer is not None and self._writer.wants(prefix, self._is_pinned)

    def _described(self, path: Path, entry: ChunkKV, nbytes: int) -> ChunkFile:
        chunk = entry.chunk
        return ChunkFile(
            path, self._identity, chunk.key, chunk.document_id, chunk.index, len(chunk.token_ids), nbytes, time.time()
        )

    def _is_pinned(self, file: ChunkFile) -> bool:
        return file.identity == self._identity and file.key.prefix in self._pins

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read and check a chunk, whichever process wrote it."""
        if prefix in self._hidden:
            return None
        entry = self._index.tried(prefix, partial(self._read, tokens=len(token_ids)))
        return entry if entry is not None and same_tokens(entry, token_ids) else None

    def _read(self, path: Path, tokens: int) -> ChunkKV:
        file, entry = read_chunk(path, self._owner, most_bytes(self._shape, self._dtype, tokens))
        check_entry(entry, self._shape, self._dtype)
        self._index.add(file)
        if self._writer is not None and abs(time.time() - file.used) > _TOUCH_SECONDS:
            touch(path)
        return entry

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read the first chunk with this content key."""
        found = self._first(content, token_ids)
        return self._first(content, token_ids) if found is None and self._index.refresh() else found

    def _first(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        entries = (self.get(prefix, token_ids) for prefix in self._index.with_content(content))
        return next((entry for entry in entries if entry is not None), None)

    def delete(self, key: ChunkKey) -> None:
        """Remove a chunk's file; one that can not be removed (a log line says so) is not served any more."""
        self._index.remove(key.prefix)
        self._hidden.add(key.prefix)
        if self._writer is None or not is_name(key.prefix):
            return
        path = chunk_path(self._folder, self._identity, key.prefix)
        try:
            path.unlink(missing_ok=True)
            self._hidden.discard(key.prefix)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path.name, error)

    def drop_document(self, document_id: str, is_used: Callable[[str], bool]) -> None:
        """Remove the files of a document's earlier versions."""
        self._index.refresh()
        for file in self._index.of_document(document_id):
            if not is_used(file.key.prefix):
                self.delete(file.key)

    def note(self, prefixes: Iterable[str], event: Event) -> None:
        """Count what happened to chunks."""
        if self._usage is not None:
            self._usage.note(prefixes, event)

    def pin(self, prefixes: Iterable[str]) -> None:
        """Keep chunks from being evicted by this store; other processes do not know of it."""
        with self._guard:
            self._pins.update(prefixes)

    def unpin(self, prefixes: Iterable[str]) -> None:
        """Take back a pin.

        Raises
        ------
        ValueError
            If a chunk is not pinned; then nothing was unpinned.
        """
        taken = Counter(prefixes)
        with self._guard:
            if not taken <= self._pins:
                raise ValueError(f"not pinned: {', '.join(sorted(taken - self._pins))}; pin() comes first")
            self._pins -= taken

    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is in the folder now."""
        return isinstance(prefix, str) and prefix not in self._hidden and self._index.lookup(prefix) is not None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys that were seen."""
        return (file.key.prefix for file in self._index if file.key.prefix not in self._hidden)

    def __len__(self) -> int:
        """Count the chunks that were seen."""
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Bytes of the files of this identity."""
        self._index.refresh()
        return sum(file.nbytes for file in self._index.current())

    @property
    def disk_bytes(self) -> int:
        """The same: all of it is files."""
        return self.nbytes

    def flush(self) -> None:
        """Add what was counted to the usage that is kept in the folder; chunks are on the medium already."""
        if self._usage is None or self._writer is None:
            return
        delta = self._usage.take_delta()
        path = usage_path(self._folder, self._identity)
        if delta["chunks"] and not self._writer.write(path, partial(usage_with, path, delta), self._is_pinned):
            self._usage.return_delta(delta)

    def close(self) -> None:
        """Keep what was counted."""
        self.flush()
