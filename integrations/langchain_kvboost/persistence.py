"""A vector store's folder: ``index.faiss``, ``docs.jsonl`` and ``manifest.json``, all of one save or none of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from langchain_core.documents import Document

__all__ = ["Saved", "Shape", "load", "save"]

FORMAT = 1
_INDEX, _DOCS, _MANIFEST = "index.faiss", "docs.jsonl", "manifest.json"
_NEW, _PART = ".new", ".part"


@dataclass(frozen=True)
class Shape:
    """What an index is.

    Parameters
    ----------
    metric
        ``"cosine"``, ``"ip"`` or ``"l2"``.
    index_factory
        As faiss writes it.
    dim
        Length of a vector; None before the first.
    """

    metric: str
    index_factory: str
    dim: int | None


@dataclass(frozen=True, eq=False)
class Saved:
    """What a folder holds.

    Parameters
    ----------
    shape
        Of the index.
    index
        Of faiss; None if there never was a vector.
    documents
        By their number in the index.
    """

    shape: Shape
    index: Any
    documents: dict[int, Document]


def save(folder: Path, saved: Saved) -> None:
    """Write a folder so that a crash at any moment leaves the old content or the new one.

    Raises
    ------
    ValueError
        If a document's metadata are no JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _finish(folder)
    files = {_DOCS: _lines(saved.documents)}
    if saved.index is not None:
        files[_INDEX] = faiss.serialize_index(saved.index).tobytes()
    manifest = {
        "format": FORMAT,
        **asdict(saved.shape),
        "documents": len(saved.documents),
        "sha256": {name: _digest(content) for name, content in files.items()},
    }
    for name, content in files.items():
        _write(folder / (name + _NEW), content)
    # The new manifest comes last and at once: where it is, so is everything it names, and `_finish` can do the rest.
    _write(folder / (_MANIFEST + _PART), json.dumps(manifest, indent=1).encode())
    os.replace(folder / (_MANIFEST + _PART), folder / (_MANIFEST + _NEW))
    _finish(folder)


def load(folder: Path) -> Saved:
    """Read a folder.

    Raises
    ------
    ValueError
        If it is missing, damaged, or of another format.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass one that save_local wrote")
    _finish(folder)
    manifest = _manifest(folder)
    shape = Shape(manifest["metric"], manifest["index_factory"], manifest["dim"])
    contents = {name: _checked(folder / name, digest) for name, digest in manifest["sha256"].items()}
    documents = _documents(contents[_DOCS], folder)
    index = _index(contents[_INDEX], folder) if _INDEX in contents else None
    if len(documents) != manifest["documents"]:
        raise ValueError(f"{folder} lists {len(documents)} documents instead of {manifest['documents']}; save it anew")
    return Saved(shape, index, documents)


def _lines(documents: dict[int, Document]) -> bytes:
    lines = []
    for number, document in documents.items():
        row = {"number": number, "id": document.id, "text": document.page_content, "metadata": document.metadata}
        try:
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the metadata of document {document.id!r} can not be written as JSON ({error}); turn them into "
                "strings, numbers, lists and dicts"
            ) from error
    return "".join(f"{line}\n" for line in lines).encode()


def _documents(content: bytes, folder: Path) -> dict[int, Document]:
    rows: Sequence[dict[str, Any]] = [_json(line, folder / _DOCS) for line in content.split(b"\n") if line]
    return {row["number"]: Document(id=row["id"], page_content=row["text"], metadata=row["metadata"]) for row in rows}


def _index(content: bytes, folder: Path) -> Any:
    try:
        return faiss.deserialize_index(np.frombuffer(content, dtype=np.uint8))
    except RuntimeError as error:
        raise ValueError(f"{folder / _INDEX} is no index of faiss; save it anew") from error


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no {_MANIFEST}; pass a folder that save_local wrote")
    manifest = _json(path.read_bytes(), path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}; save it anew with this version")
    missing = {"metric", "index_factory", "dim", "documents", "sha256"} - set(manifest)
    files = manifest.get("sha256")
    if missing or not isinstance(files, dict) or not {_DOCS} <= set(files) <= {_DOCS, _INDEX}:
        raise ValueError(f"{path} is incomplete; save it anew")
    return manifest


def _json(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; save it anew") from error


def _checked(path: Path, digest: str) -> bytes:
    content = path.read_bytes() if path.is_file() else None
    if content is None or _digest(content) != digest:
        state = "is missing" if content is None else "is damaged: its checksum differs"
        raise ValueError(f"{path} {state}; save the store anew")
    return content


def _finish(folder: Path) -> None:
    """Move a new save into place, if all of it was written; otherwise leave the old one as it is."""
    new = folder / (_MANIFEST + _NEW)
    if not new.is_file():
        return
    names = json.loads(new.read_bytes())["sha256"]
    for name in (*names, _MANIFEST):
        # One that is gone was moved before a crash.
        if (folder / (name + _NEW)).is_file():
            os.replace(folder / (name + _NEW), folder / name)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
