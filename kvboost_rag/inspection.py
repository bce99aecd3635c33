"""What a cache folder holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kvboost_rag.store import ChunkFile, read_headers

__all__ = ["CachedDocument", "inspect_folder"]


@dataclass(frozen=True)
class CachedDocument:
    """A document's KV in a folder.

    Parameters
    ----------
    document_id
        As it was added.
    fingerprint
        Of the model and the canonical context that the KV belongs to.
    chunks, tokens, nbytes
        How much of it there is.
    """

    document_id: str
    fingerprint: str
    chunks: int
    tokens: int
    nbytes: int


def inspect_folder(folder: Path) -> list[CachedDocument]:
    """List the documents of a cache folder, by fingerprint and id.

    Raises
    ------
    ValueError
        If there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the cache_dir of an engine, or run the demo first")
    groups: dict[tuple[str, str], list[ChunkFile]] = defaultdict(list)
    for file in read_headers(folder):
        groups[file.fingerprint, file.document_id].append(file)
    return [
        CachedDocument(document_id, fingerprint, len(f), sum(c.tokens for c in f), sum(c.nbytes for c in f))
        for (fingerprint, document_id), f in sorted(groups.items())
    ]
