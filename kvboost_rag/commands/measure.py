"""``kvboost-rag bench``, ``bench-eviction`` and ``calibrate``: what is measured, on whose data."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.commands.arguments import add_layout, add_model, default_cache

if TYPE_CHECKING:
    from kvboost_rag.calibrate import Calibration

__all__ = ["add_bench", "add_calibrate", "add_eviction", "run_bench", "run_calibrate", "run_eviction"]


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench`` to a parser."""
    from kvboost_rag import bench

    bench.add_arguments(parser)


def add_eviction(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-eviction`` to a parser."""
    parser.add_argument("--requests", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate`` to a parser."""
    add_model(parser)
    parser.add_argument("--data", type=Path, help="questions as for bench (default: the documents' sentences)")
    parser.add_argument("--samples", type=int, default=8, help="how many to measure (default 8)")
    parser.add_argument("--k", type=int, default=4, help="documents per question without --data (default 4)")
    add_layout(parser)
    parser.add_argument("--context-documents", type=Path, help="text file to encode documents after, or generic")
    parser.add_argument("--max-document-tokens", type=int, help="cut each document here (default: nowhere)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--plot", type=Path, help="PNG or SVG file for the frontier")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_bench(args: argparse.Namespace) -> None:
    """Measure, print the table, draw the picture."""
    from kvboost_rag import bench, plots

    if args.plot:
        plots.require(args.plot)
    options = bench.options_from(args)
    result = bench.run_bench(options)
    print(bench.format_table(result))
    if args.plot:
        plots.frontier(result["summary"], f"{options.model_name}, {options.data.name}").save(args.plot)


def run_eviction(args: argparse.Namespace) -> None:
    """Replay the requests and print the table."""
    from kvboost_rag.replay import TraceOptions, format_table, run_replay

    result = run_replay(TraceOptions(requests=args.requests, seed=args.seed))
    print(json.dumps(result) if args.json else format_table(result))


def run_calibrate(args: argparse.Namespace) -> None:
    """Measure, write the policy, print what auto takes then."""
    from kvboost_rag import bench, plots
    from kvboost_rag.policy import QUALITIES
    from kvboost_rag.store import make_folder

    if args.data and args.docs:
        raise ValueError("--data brings its own documents; leave --docs out, or --data")
    if args.plot:
        plots.require(args.plot)
    folder = args.cache_dir or default_cache()
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
