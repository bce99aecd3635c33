"""``kvboost-rag demo``."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvboost_rag.commands.arguments import add_model, default_cache

if TYPE_CHECKING:
    from kvboost_rag.demo import Answered

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``demo`` to a parser."""
    add_model(parser)
    parser.add_argument("--repair", default="auto", help="repair method (default auto)")
    parser.add_argument("--question", action="append", default=[], help="ask this instead (may be given several times)")
    parser.add_argument("--k", type=int, help="documents per question (default: 2 for smollm2, else 4)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of an answer (default 32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Answer the questions and print what was measured."""
    if not args.json:
        print(f"loading {args.model}; the first start is the longest: it converts weights and computes KV", flush=True)
    from kvboost_rag.demo import DemoOptions, ask_all, prepare

    options = DemoOptions(
        args.model, args.docs, tuple(args.question), args.k, args.max_tokens, args.repair,
        args.cache_dir or default_cache(),
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


def _described(answer: Answered) -> str:
    from kvboost_rag.report import strip

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
