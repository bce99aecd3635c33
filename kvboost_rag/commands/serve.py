"""``kvboost-rag serve``."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.commands.arguments import size
from kvboost_rag.layouts import LAYOUTS
from kvboost_rag.quantize import KV_DTYPES

if TYPE_CHECKING:
    from kvboost_rag.server import Engines, Keys, Limits, Place
    from kvboost_rag.types import Document

__all__ = ["add_arguments", "run"]

KEYS_VARIABLE = "KVBOOST_API_KEYS"
STORE_VARIABLE = "KVBOOST_STORE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve`` to a parser."""
    parser.add_argument("--model", default="smollm2", help="folder, GGUF file, or model id (default: smollm2)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument("--api-keys", type=Path, help=f"file of namespace:key lines (default: ${KEYS_VARIABLE})")
    parser.add_argument("--replicas", type=int, help="on Ray Serve, each with the model (default: this process alone)")
    parser.add_argument("--replica-cpus", type=float, help="cores of each replica (default 1)")
    parser.add_argument("--replica-gpus", type=float, help="GPUs of each replica, which computes there (default 0)")
    parser.add_argument("--ray-address", help="of a Ray cluster (default: one of its own on this machine)")
    parser.add_argument("--allow-anyone", action="store_true", help="serve other machines without keys")
    _engine_arguments(parser.add_argument_group("engines", "budgets are those of each namespace"))
    _limit_arguments(parser.add_argument_group("limits"))


def _engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layout", choices=tuple(LAYOUTS), default="chat", help="of documents (default chat)")
    group.add_argument("--repair", help="repair method (default auto)")
    group.add_argument("--kv-dtype", choices=KV_DTYPES, default="native", help="what KV is stored as")
    group.add_argument(
        "--documents", type=Path, help="added at the start: folder of text files, or lines of {id, text} in JSON"
    )
    group.add_argument("--cache-dir", type=Path, help="where KV is kept for the next start, a folder for a namespace")
    group.add_argument("--store", help=f"a Redis server to share KV by, redis://HOST (default: ${STORE_VARIABLE})")
    group.add_argument("--max-memory-bytes", type=size, help="documents' KV in memory, as 4GiB (default: no limit)")
    group.add_argument("--max-disk-bytes", type=size, help="documents' KV in --cache-dir (default: no limit)")
    group.add_argument("--max-prefix-bytes", type=size, default=1 << 30, help="KV of earlier prompts (default 1GiB)")
    group.add_argument("--trusted-only", action="store_true", help="refuse documents that nobody added beforehand")
    group.add_argument("--secret-file", type=Path, help="file with the secret that signs stored KV")


def _limit_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-concurrent", type=int, default=8, help="requests at a time (default 8)")
    group.add_argument("--max-queue", type=int, default=64, help="requests that wait; more get 429 (default 64)")
    group.add_argument("--max-body-bytes", type=size, default=8 << 20, help="of a request (default 8MiB)")
    group.add_argument("--max-tokens", type=int, default=4096, help="of an answer (default 4096)")
    group.add_argument("--max-prompt-tokens", type=int, help="of a prompt (default: the context window)")
    group.add_argument("--max-documents", type=int, default=64, help="of one chat (default 64)")
    group.add_argument("--max-batch-documents", type=int, default=1024, help="added at once (default 1024)")
    group.add_argument("--max-known-documents", type=int, default=100_000, help="of a namespace (default 100000)")
    group.add_argument("--max-waiting-per-key", type=int, help="of one namespace (default: half of them)")
    group.add_argument("--timeout", type=float, help="seconds for one answer (default: no limit)")
    group.add_argument("--receive-timeout", type=float, default=60.0, help="seconds for a request to come (default 60)")
    group.add_argument("--send-timeout", type=float, default=60.0, help="seconds a stream may stay unread (default 60)")
    group.add_argument("--drain", type=float, default=30.0, help="seconds for running requests at the end (default 30)")


def run(args: argparse.Namespace) -> None:
    """Load the model and serve it until a signal comes.

    Raises
    ------
    ImportError
        If the extra ``serve`` is not installed.
    ValueError, OSError
        If an option can not be used.
    """
    from kvboost_rag.server import check_host, taken_place
    from kvboost_rag.server.heap import share_one_heap

    share_one_heap()
    keys = _keys(args.api_keys)
    check_host(args.host, keys, allow_anyone=args.allow_anyone)
    limits = _limits(args)
    # A port that can not be had is no reason to load a model first.
    with taken_place(args.host, args.port) as place:
        (_run_one if args.replicas is None else _run_replicas)(args, keys, limits, place)


def _run_one(args: argparse.Namespace, keys: Keys, limits: Limits, place: Place) -> None:
    from kvboost_rag.server import Service, serve

    for name in ("ray_address", "replica_cpus", "replica_gpus"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for replicas; give --replicas N")
    documents = [] if args.documents is None else _documents(args.documents)
    service = Service(_engines(args, keys), keys, limits)
    for engine in service.engines.all:
        engine.add_documents(documents, show_progress=None)
    serve(
        service, place,
        announce=lambda address: print(_greeting(service.engines.name, keys, address), flush=True),
        log_level="info" if args.verbose else "warning",
    )  # fmt: skip


def _run_replicas(args: argparse.Namespace, keys: Keys, limits: Limits, place: Place) -> None:
    from kvboost_rag.replicas import ReplicaOptions, serve_replicas

    if args.documents is not None:
        raise ValueError("--documents is for one process; add documents to replicas by POST /v1/documents")
    resources = {
        "num_cpus": 1.0 if args.replica_cpus is None else args.replica_cpus,
        "num_gpus": 0.0 if args.replica_gpus is None else args.replica_gpus,
    }  # fmt: skip
    options = ReplicaOptions(
        args.model, model_name(args.model), keys, limits, _engine_options(args), resources,
        log_level=logging.INFO if args.verbose else logging.WARNING,
    )  # fmt: skip
    serve_replicas(
        options, args.replicas, place, ray_address=args.ray_address,
        announce=lambda address: print(_greeting(options.name, keys, address), flush=True),
        log_level="info" if args.verbose else "warning",
    )  # fmt: skip


def _keys(path: Path | None) -> Keys:
    from kvboost_rag.server import Keys

    text = os.environ.get(KEYS_VARIABLE, "") if path is None else path.read_text(encoding="utf-8")
    return Keys() if path is None and not text else Keys.parse(text)


def _limits(args: argparse.Namespace) -> Limits:
    from kvboost_rag.server import Limits

    return Limits(**{name: getattr(args, name) for name in Limits.__dataclass_fields__})


def _documents(path: Path) -> list[Document]:
    from kvboost_rag.demo_documents import read_folder
    from kvboost_rag.server.documents import read_documents

    return read_folder(path) if path.is_dir() else read_documents(path)


def _engines(args: argparse.Namespace, keys: Keys) -> Engines:
    from kvboost_rag.loading import load_model
    from kvboost_rag.server import Engines

    return Engines(*load_model(args.model), model_name(args.model), keys.namespaces, _engine_options(args))


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "layout": LAYOUTS[args.layout], "repair": args.repair, "kv_dtype": args.kv_dtype, "cache_dir": args.cache_dir,
        "max_memory_bytes": args.max_memory_bytes, "max_disk_bytes": args.max_disk_bytes,
        "max_prefix_bytes": args.max_prefix_bytes, "trusted_only": args.trusted_only,
        # Answers that are under way share their forwards, all of them.
        "max_batch": args.max_concurrent, "store": args.store or os.environ.get(STORE_VARIABLE) or None,
        "secret": None if args.secret_file is None else args.secret_file.read_bytes().strip(),
    }  # fmt: skip


def model_name(model: str) -> str:
    """Return what requests call a model: the last part of a path, an id as it is."""
    return Path(model).name if Path(model).exists() else model


def _greeting(model: str, keys: Keys, address: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Who wrote Faust?"}]})
    key = " -H 'Authorization: Bearer KEY'" if keys.digests else ""
    return (
        f"{model} at {address}/v1\n"
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )
