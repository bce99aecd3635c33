"""``kvboost-rag precompute`` and ``kvboost-rag inspect``: a folder of KV is filled and looked at."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.commands.arguments import add_layout, add_model, default_cache, size
from kvboost_rag.quantize import KV_DTYPES

if TYPE_CHECKING:
    from kvboost_rag.inspection import CachedDocument

__all__ = ["add_inspect", "add_precompute", "inspect", "precompute"]


def add_precompute(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``precompute`` to a parser."""
    add_model(parser)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="native", help="what KV is stored as")
    parser.add_argument("--max-disk-bytes", type=size, help="budget of the folder, as 4GiB")
    parser.add_argument("--namespace", default="", help="tenant that alone finds the KV")
    parser.add_argument("--secret-file", type=Path, help="file with the secret that signs the KV")
    add_layout(parser)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect`` to a parser."""
    parser.add_argument("folder", type=Path, nargs="?", help="cache folder (default: the demo's)")
    parser.add_argument("--verify", action="store_true", help="read every file and check it; 1 if one is damaged")
    parser.add_argument("--prune", action="store_true", help="remove damaged and left-over files first")
    parser.add_argument("--max-disk-bytes", type=size, help="prune to this size, as 4GiB; rarely used KV goes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _secret(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes().strip()


def precompute(args: argparse.Namespace) -> int:
    """Compute KV into the folder; 1 if not all of it is there then."""
    from kvboost_rag.demo_documents import demo_documents, read_folder
    from kvboost_rag.engine import KVBoostEngine
    from kvboost_rag.inspection import inspect_folder
    from kvboost_rag.layouts import LAYOUTS, layout_name

    layout = LAYOUTS[args.layout or layout_name(args.model)]
    documents = read_folder(args.docs) if args.docs else demo_documents()
    folder = args.cache_dir or default_cache()
    # All of it goes to the folder; memory is only on the way.
    with KVBoostEngine.from_pretrained(
        args.model, cache_dir=folder, layout=layout, kv_dtype=args.kv_dtype, max_disk_bytes=args.max_disk_bytes,
        max_memory_bytes="1GiB", namespace=args.namespace, secret=_secret(args.secret_file),
    ) as engine:  # fmt: skip
        engine.add_documents(documents, show_progress=True)
        engine.flush()
        stats, ids = engine.stats, {document.id for document in documents}
        stored = [d for d in inspect_folder(folder) if d.identity == engine.context_key and d.document_id in ids]
    tokens = sum(document.tokens for document in stored)
    print(
        f"{len(documents)} documents, {stats.document_tokens} tokens, {tokens} of them as KV in {folder} "
        f"({sum(document.nbytes for document in stored) / 2**20:.1f} MiB)"
    )
    if tokens < stats.document_tokens:
        print("kvboost-rag: not all of it is stored; give a larger --max-disk-bytes or more disk", file=sys.stderr)
    return int(tokens < stats.document_tokens)


def inspect(args: argparse.Namespace) -> int:
    """List the folder, and check or prune it; 1 if a file is damaged."""
    from kvboost_rag.inspection import damaged_files, inspect_folder
    from kvboost_rag.store import prune_folder

    if args.max_disk_bytes is not None and not args.prune:
        raise ValueError("--max-disk-bytes removes KV; say --prune, too")
    folder = args.folder or default_cache()
    documents = inspect_folder(folder)
    removed = [str(p.relative_to(folder)) for p in prune_folder(folder, args.max_disk_bytes)] if args.prune else []
    documents = inspect_folder(folder) if removed else documents
    damaged = damaged_files(folder) if args.verify else None
    if args.json:
        out = {"folder": str(folder), "documents": [asdict(d) for d in documents], "removed": removed}
        print(json.dumps(out if damaged is None else out | {"damaged": damaged}))
    else:
        _print_folder(folder, documents)
        if args.prune:
            print(f"{len(removed)} files removed")
        for path, why in (damaged or {}).items():
            print(f"damaged: {path}: {why}")
        if damaged is not None:
            print(f"{len(damaged)} damaged files" + ("; --prune removes them" if damaged else ""))
    return 1 if damaged else 0


def _shown(text: str) -> str:
    """Write what a file says without what would steer the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _print_folder(folder: Path, documents: Sequence[CachedDocument]) -> None:
    columns = f"{'chunks':>7}{'tokens':>8}{'MiB':>9}{'retrieved':>11}{'used':>6}{'served':>8}{'importance':>12}"
    print(f"{'model':<10}{columns}  {'tier':<6}document")
    for d in documents:
        figures = f"{d.chunks:>7}{d.tokens:>8}{d.nbytes / 2**20:>9.1f}{d.retrieved:>11}{d.used:>6}{d.served:>8}"
        print(f"{d.identity[:8]:<10}{figures}{d.importance:>12.2f}  {d.tier:<6}{_shown(d.document_id)}")
    total = sum(d.nbytes for d in documents) / 2**20
    print(f"{len(documents)} documents, {sum(d.tokens for d in documents)} tokens, {total:.1f} MiB in {folder}")
