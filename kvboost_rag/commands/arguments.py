"""Options that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvboost_rag.converted import cache_root
from kvboost_rag.layouts import LAYOUTS
from kvboost_rag.sizes import parse_bytes

__all__ = ["add_layout", "add_model", "default_cache", "size"]


def size(text: str) -> int:
    """Read an amount of bytes, for argparse."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add model, documents and cache folder."""
    parser.add_argument("--model", default="smollm2", help="folder, GGUF file, or model id (default: smollm2)")
    parser.add_argument("--docs", type=Path, help="folder of text files (default: the paragraphs that come along)")
    parser.add_argument("--cache-dir", type=Path, help="where KV is kept for the next start")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the layout of prompts."""
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="of the prompts (default: the demo's)")


def default_cache() -> Path:
    """Return the folder of KV when none is named."""
    return cache_root().parent / "kv"
