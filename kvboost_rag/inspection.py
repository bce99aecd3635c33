"""What a cache folder holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kvboost_rag.store import ChunkFile, chunk_paths, read_headers, read_usage, verify_files

__all__ = ["CachedDocument", "damaged_files", "inspect_folder"]


@dataclass(frozen=True)
class CachedDocument:
    """A document's KV in a folder.

    Parameters
    ----------
    document_id
        As it was added.
    identity
        Of the model and the canonical context that the KV belongs to.
    chunks, tokens, nbytes
        How much of it there is.
    retrieved, used, served
        How often a retriever returned it, a prompt held it, its KV came out of a store; as of the last time that an
        engine over the folder was flushed or closed.
    importance
        Retrievals and uses, older ones counting less: what goes first has the least of it.
    tier
        Where the KV lies.
    """

    document_id: str
    identity: str
    chunks: int
    tokens: int
    nbytes: int
    retrieved: int
    used: int
    served: int
    importance: float
    tier: str = "disk"


def inspect_folder(folder: Path) -> list[CachedDocument]:
    """List the documents of a cache folder, by identity and id.

    Raises
    ------
    ValueError
        If there is no such folder, or it holds folders of namespaces and no KV itself.
    """
    _check(folder)
    groups: dict[str, dict[str, list[ChunkFile]]] = defaultdict(lambda: defaultdict(list))
    for file in read_headers(folder):
        groups[file.identity][file.document_id].append(file)
    return [
        document
        for identity, files in sorted(groups.items())
        for document in _documents(folder, identity, files)
    ]


def _documents(folder: Path, identity: str, files: dict[str, list[ChunkFile]]) -> list[CachedDocument]:
    ledger = read_usage(folder, identity)
    out = []
    for document_id, chunks in sorted(files.items()):
        # A prompt may hold a document's beginning alone, so its first chunk knows the most.
        first = min(chunks, key=lambda chunk: chunk.index).key.prefix
        usage = ledger.usage(first)
        out.append(
            CachedDocument(
                document_id, identity, len(chunks), sum(c.tokens for c in chunks), sum(c.nbytes for c in chunks),
                usage.retrieved, usage.used, usage.served, ledger.frequency(first),
            )  # fmt: skip
        )
    return out


def damaged_files(folder: Path) -> dict[str, str]:
    """Read every chunk of a folder and check it; return why the damaged ones can not be used, by path in the folder.

    Raises
    ------
    ValueError
        As by :func:`inspect_folder`.
    """
    _check(folder)
    return {str(path.relative_to(folder)): why for path, why in verify_files(folder) if why}


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the cache_dir of an engine, or run the demo first")
    if _has_chunks(folder) or not (names := _namespaces(folder)):
        return
    raise ValueError(f"{folder} has a folder for each namespace ({', '.join(names)}); name one, as {folder / names[0]}")


def _namespaces(folder: Path) -> list[str]:
    """Names of the folders in a server's cache folder, each of which is one with KV."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and _has_chunks(path))


def _has_chunks(folder: Path) -> bool:
    return next(chunk_paths(folder), None) is not None
