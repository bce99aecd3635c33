"""The command line ``kvboost-rag``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvboost_rag.converted import cache_root
from kvboost_rag.errors import KVBoostError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors are one line and a non-zero exit status.

    Returns
    -------
    int
        0, 1 after an error, 2 after wrong usage, 130 after Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has left; nothing is wrong. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KVBoostError, ValueError, OSError, ImportError) as error:
        print(f"kvboost-rag: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvboost-rag: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    from kvboost_rag import __version__, bench

    parser = argparse.ArgumentParser(prog="kvboost-rag", description="Reuse the KV of retrieved documents anywhere.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--verbose", action="store_true", help="show what is going on")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="index documents, ask questions, compare with full prefill")
    _model_arguments(demo)
    demo.add_argument("--repair", default="cacheblend:0.15", help="repair method (default cacheblend:0.15)")
    demo.add_argument("--question", action="append", default=[], help="ask this instead (may be given several times)")
    demo.add_argument("--k", type=int, help="documents per question (default: 2 for smollm2, else 4)")
    demo.add_argument("--max-tokens", type=int, default=32, help="length of an answer (default 32)")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    demo.set_defaults(run=_demo)

    precompute = commands.add_parser("precompute", help="turn a folder of documents into KV on disk")
    _model_arguments(precompute)
    precompute.add_argument("--layout", choices=("completion", "chat"), help="prompts to prepare (default: the demo's)")
    precompute.set_defaults(run=_precompute)

    inspect = commands.add_parser("inspect", help="list what a cache folder holds")
    inspect.add_argument("folder", type=Path, nargs="?", help="cache folder (default: the demo's)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)

    measure = commands.add_parser("bench", help="measure speed and quality against full prefill")
    bench.add_arguments(measure)
    measure.set_defaults(run=_bench)
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="folder, GGUF file, or model id (default: smollm2)")
    parser.add_argument("--docs", type=Path, help="folder of text files (default: the paragraphs that come along)")
    parser.add_argument("--cache-dir", type=Path, help="where KV is kept for the next start")


def _default_cache() -> Path:
    return cache_root().parent / "kv"


def _demo(args: argparse.Namespace) -> None:
    from kvboost_rag.demo import Answered, DemoOptions, ask_all, prepare

    options = DemoOptions(
        args.model, args.docs, tuple(args.question), args.k, args.max_tokens, args.repair,
        args.cache_dir or _default_cache(),
    )
    start = time.perf_counter()
    demo = prepare(options, show_progress=not args.json)
    ready = time.perf_counter() - start
    with demo.engine:
        stats = demo.engine.stats
        if not args.json:
            print(f"{stats.documents} documents, {stats.document_tokens} tokens as KV; ready after {ready:.1f} s\n")
        answers: list[Answered] = []
        for answer in ask_all(demo):
            answers.append(answer)
            if not args.json:
                print(_described(answer))
    if args.json:
        print(json.dumps({"ready_s": ready, "stats": asdict(stats), "answers": [a.record() for a in answers]}))
    else:
        print(_summary([a.full.report.ttft / a.reused.report.ttft for a in answers]))


def _described(answer: object) -> str:
    from kvboost_rag.demo import Answered
    from kvboost_rag.report import strip

    assert isinstance(answer, Answered)
    reused, full = answer.reused, answer.full
    expected = f"   (expected: {' / '.join(answer.expected)})" if answer.expected else ""
    return "\n".join(
        [
            f"Q  {answer.question}{expected}",
            f"   sources: {', '.join(answer.sources)} ({answer.order})",
            f"   reuse         {reused.report.ttft * 1000:7.0f} ms to the first token   {reused.text.strip()!r}",
            f"   full prefill  {full.report.ttft * 1000:7.0f} ms to the first token   {full.text.strip()!r}",
            f"   [{strip(reused.report.spans)}]",
            "",
        ]
    )


def _summary(ratios: list[float]) -> str:
    middle = sorted(ratios)[len(ratios) // 2]
    return (
        f"Median: the first token comes {middle:.1f} times sooner than with full prefill of the same tokens.\n"
        "Strip: = exact, ~ reused from another context, R recomputed, C computed."
    )


def _precompute(args: argparse.Namespace) -> None:
    from kvboost_rag.demo_documents import demo_documents, read_folder
    from kvboost_rag.engine import KVBoostEngine
    from kvboost_rag.layouts import LAYOUTS, layout_for

    layout = LAYOUTS[args.layout] if args.layout else layout_for(args.model)
    documents = read_folder(args.docs) if args.docs else demo_documents()
    folder = args.cache_dir or _default_cache()
    with KVBoostEngine.from_pretrained(args.model, cache_dir=folder, layout=layout) as engine:
        engine.add_documents(documents, show_progress=True)
        print(f"{len(documents)} documents, {engine.stats.document_tokens} tokens as KV in {folder}")


def _inspect(args: argparse.Namespace) -> None:
    from kvboost_rag.inspection import inspect_folder

    folder = args.folder or _default_cache()
    documents = inspect_folder(folder)
    if args.json:
        print(json.dumps({"folder": str(folder), "documents": [asdict(d) for d in documents]}))
        return
    print(f"{'model':<10}{'chunks':>7}{'tokens':>8}{'MiB':>9}  document")
    for d in documents:
        print(f"{d.fingerprint[:8]:<10}{d.chunks:>7}{d.tokens:>8}{d.nbytes / 2**20:>9.1f}  {d.document_id}")
    total = sum(d.nbytes for d in documents) / 2**20
    print(f"{len(documents)} documents, {sum(d.tokens for d in documents)} tokens, {total:.1f} MiB in {folder}")


def _bench(args: argparse.Namespace) -> None:
    from kvboost_rag import bench

    print(bench.format_table(bench.run_bench(bench.options_from(args))))


if __name__ == "__main__":
    sys.exit(main())
