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
from typing import TYPE_CHECKING

from kvboost_rag.converted import cache_root
from kvboost_rag.errors import KVBoostError
from kvboost_rag.sizes import parse_bytes

if TYPE_CHECKING:
    from kvboost_rag.calibrate import Calibration
    from kvboost_rag.inspection import CachedDocument

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors are one line and a non-zero exit status.

    Returns
    -------
    int
        0, 1 after an error or for a damaged folder, 2 after wrong usage, 130 after Ctrl-C.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        status: int = args.run(args) or 0
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
    return status


def _parser() -> argparse.ArgumentParser:
    from kvboost_rag import __version__, bench, serve_command
    from kvboost_rag.quantize import KV_DTYPES

    parser = argparse.ArgumentParser(prog="kvboost-rag", description="Reuse the KV of retrieved documents anywhere.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--verbose", action="store_true", help="show what is going on")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="index documents, ask questions, compare with full prefill")
    _model_arguments(demo)
    demo.add_argument("--repair", default="auto", help="repair method (default auto)")
    demo.add_argument("--question", action="append", default=[], help="ask this instead (may be given several times)")
    demo.add_argument("--k", type=int, help="documents per question (default: 2 for smollm2, else 4)")
    demo.add_argument("--max-tokens", type=int, default=32, help="length of an answer (default 32)")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    demo.set_defaults(run=_demo)

    precompute = commands.add_parser("precompute", help="turn a folder of documents into KV on disk")
    _model_arguments(precompute)
    precompute.add_argument("--kv-dtype", choices=KV_DTYPES, default="native", help="what KV is stored as")
    precompute.add_argument("--max-disk-bytes", type=_size, help="budget of the folder, as 4GiB")
    precompute.add_argument("--namespace", default="", help="tenant that alone finds the KV")
    precompute.add_argument("--secret-file", type=Path, help="file with the secret that signs the KV")
    _layout_argument(precompute)
    precompute.set_defaults(run=_precompute)

    inspect = commands.add_parser("inspect", help="list what a cache folder holds")
    inspect.add_argument("folder", type=Path, nargs="?", help="cache folder (default: the demo's)")
    inspect.add_argument("--verify", action="store_true", help="read every file and check it; 1 if one is damaged")
    inspect.add_argument("--prune", action="store_true", help="remove damaged and left-over files first")
    inspect.add_argument("--max-disk-bytes", type=_size, help="prune to this size, as 4GiB; rarely used KV goes")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)

    serve = commands.add_parser("serve", help="answer OpenAI's clients over HTTP")
    serve_command.add_arguments(serve)
    serve.set_defaults(run=serve_command.run)

    measure = commands.add_parser("bench", help="measure speed and quality against full prefill")
    bench.add_arguments(measure)
    measure.set_defaults(run=_bench)

    eviction = commands.add_parser("bench-eviction", help="compare eviction methods on made-up requests")
    eviction.add_argument("--requests", type=int, default=10_000, help="how many (default 10000)")
    eviction.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    eviction.add_argument("--json", action="store_true", help="print one JSON object")
    eviction.set_defaults(run=_bench_eviction)

    _calibrate_arguments(
        commands.add_parser("calibrate", help="measure what each repair costs and gives; auto uses it")
    )
    return parser


def _calibrate_arguments(calibrate: argparse.ArgumentParser) -> None:
    _model_arguments(calibrate)
    calibrate.add_argument("--data", type=Path, help="questions as for bench (default: the documents' sentences)")
    calibrate.add_argument("--samples", type=int, default=8, help="how many to measure (default 8)")
    calibrate.add_argument("--k", type=int, default=4, help="documents per question without --data (default 4)")
    _layout_argument(calibrate)
    calibrate.add_argument("--context-documents", type=Path, help="text file to encode documents after, or generic")
    calibrate.add_argument("--max-document-tokens", type=int, help="cut each document here (default: nowhere)")
    calibrate.add_argument("--threads", type=int, help="threads of torch")
    calibrate.add_argument("--plot", type=Path, help="PNG or SVG file for the frontier")
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    calibrate.set_defaults(run=_calibrate)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="folder, GGUF file, or model id (default: smollm2)")
    parser.add_argument("--docs", type=Path, help="folder of text files (default: the paragraphs that come along)")
    parser.add_argument("--cache-dir", type=Path, help="where KV is kept for the next start")


def _layout_argument(parser: argparse.ArgumentParser) -> None:
    from kvboost_rag.layouts import LAYOUTS

    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="of the prompts (default: the demo's)")


def _default_cache() -> Path:
    return cache_root().parent / "kv"


def _demo(args: argparse.Namespace) -> None:
    if not args.json:
        print(f"loading {args.model}; the first start is the longest: it converts weights and computes KV", flush=True)
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


def _secret(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes().strip()


def _precompute(args: argparse.Namespace) -> int:
    from kvboost_rag.demo_documents import demo_documents, read_folder
    from kvboost_rag.engine import KVBoostEngine
    from kvboost_rag.inspection import inspect_folder
    from kvboost_rag.layouts import LAYOUTS, layout_name

    layout = LAYOUTS[args.layout or layout_name(args.model)]
    documents = read_folder(args.docs) if args.docs else demo_documents()
    folder = args.cache_dir or _default_cache()
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


def _inspect(args: argparse.Namespace) -> int:
    from kvboost_rag.inspection import damaged_files, inspect_folder
    from kvboost_rag.store import prune_folder

    if args.max_disk_bytes is not None and not args.prune:
        raise ValueError("--max-disk-bytes removes KV; say --prune, too")
    folder = args.folder or _default_cache()
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


def _bench(args: argparse.Namespace) -> None:
    from kvboost_rag import bench, plots

    if args.plot:
        plots.require(args.plot)
    options = bench.options_from(args)
    result = bench.run_bench(options)
    print(bench.format_table(result))
    if args.plot:
        plots.frontier(result["summary"], f"{options.model_name}, {options.data.name}").save(args.plot)


def _bench_eviction(args: argparse.Namespace) -> None:
    from kvboost_rag.replay import TraceOptions, format_table, run_replay

    result = run_replay(TraceOptions(requests=args.requests, seed=args.seed))
    print(json.dumps(result) if args.json else format_table(result))


def _calibrate(args: argparse.Namespace) -> None:
    from kvboost_rag import bench, plots
    from kvboost_rag.policy import QUALITIES
    from kvboost_rag.store import make_folder

    if args.data and args.docs:
        raise ValueError("--data brings its own documents; leave --docs out, or --data")
    if args.plot:
        plots.require(args.plot)
    folder = args.cache_dir or _default_cache()
    make_folder(folder)
    done = _calibrated(args, folder)
    if args.plot:
        picture = plots.frontier(done.result["summary"], f"{args.model}, calibration", answers=args.data is not None)
        picture.save(args.plot)
    points = {quality: done.policy.choose(quality) for quality in QUALITIES}
    if args.json:
        chosen = {quality: point and asdict(point) for quality, point in points.items()}
        print(json.dumps({"policy": str(done.path), "summary": done.result["summary"], "chosen": chosen}))
        return
    print(bench.format_table(done.result))
    for quality, point in points.items():
        if point is None:
            print(f"auto:{quality:<9} full prefill: nothing reaches a KL of {QUALITIES[quality]}")
        else:
            print(f"auto:{quality:<9} {point.repair:<16} TTFT {point.ttft_ratio:.3f}  KL {point.kl:.4f}")
    print(f"policy in {done.path}")


def _calibrated(args: argparse.Namespace, folder: Path) -> Calibration:
    from kvboost_rag.bench import BenchOptions
    from kvboost_rag.calibrate import CALIBRATED, calibrate, calibrate_documents, digest
    from kvboost_rag.demo_documents import demo_documents, read_folder
    from kvboost_rag.layouts import layout_name

    show_progress = False if args.json else None
    shared = {
        "model": args.model, "max_document_tokens": args.max_document_tokens, "threads": args.threads,
        "layout": args.layout or layout_name(args.model), "context_documents": args.context_documents,
    }  # fmt: skip
    if not args.data:
        documents = read_folder(args.docs) if args.docs else demo_documents()
        return calibrate_documents(
            documents, folder, samples=args.samples, k=args.k, show_progress=show_progress, **shared
        )
    name = f"calibration-{digest((str(args.data), args.samples, {k: str(v) for k, v in shared.items()}))}"
    options = BenchOptions(
        data=args.data, output=folder / f"{name}.json", methods=("full", *CALIBRATED), limit=args.samples,
        ingest_rates=False, **shared,
    )  # fmt: skip
    return calibrate(options, folder, show_progress=show_progress)


if __name__ == "__main__":
    sys.exit(main())
