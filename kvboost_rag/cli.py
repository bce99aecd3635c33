"""The command line ``kvboost-rag``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kvboost_rag.errors import KVBoostError

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
    from kvboost_rag import __version__
    from kvboost_rag.commands import cache, demo, measure, serve

    parser = argparse.ArgumentParser(prog="kvboost-rag", description="Reuse the KV of retrieved documents anywhere.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--verbose", action="store_true", help="show what is going on")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add_arguments, run, what in (
        ("demo", demo.add_arguments, demo.run, "index documents, ask questions, compare with full prefill"),
        ("precompute", cache.add_precompute, cache.precompute, "turn a folder of documents into KV on disk"),
        ("inspect", cache.add_inspect, cache.inspect, "list what a cache folder holds"),
        ("serve", serve.add_arguments, serve.run, "answer OpenAI's clients over HTTP"),
        ("bench", measure.add_bench, measure.run_bench, "measure speed and quality against full prefill"),
        ("bench-eviction", measure.add_eviction, measure.run_eviction, "compare eviction methods on made-up requests"),
        (
            "calibrate", measure.add_calibrate, measure.run_calibrate,
            "measure what each repair costs and gives; auto uses it",
        ),
    ):  # fmt: skip
        command = commands.add_parser(name, help=what)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
