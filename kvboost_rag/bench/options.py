"""What a benchmark run is asked to do."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvboost_rag.generic_texts import CONTEXT_TEXTS
from kvboost_rag.layouts import LAYOUTS
from kvboost_rag.policy import Policy
from kvboost_rag.prompt import Layout
from kvboost_rag.quantize import KV_DTYPES, SINK_TOKENS, KVFormat
from kvboost_rag.repair import parse_repair

__all__ = ["BASELINES", "METHODS", "BenchOptions", "add_arguments", "options_from"]

BASELINES = ("full", "prefix-cache", "joint")
"""Methods that are not repairs."""

METHODS = ("full", "prefix-cache", "none", "random:0.15", "selective:16", "cacheblend:0.15")
"""Measured when ``--methods`` is not given."""

_GENERIC = Path("generic")
_DTYPES = ("float32", "bfloat16", "float16")
_COUNTS = ("limit", "max_documents", "max_document_tokens", "fill_tokens", "repeats", "threads")


@dataclass(frozen=True)
class BenchOptions:
    """A benchmark run.

    Parameters
    ----------
    data
        JSON lines with id, question, documents (title and text), answers and choices (or null).
    output
        Where the JSON goes; while the run lasts, finished samples lie beside it in ``OUTPUT.partial.jsonl``.
    model
        As :meth:`kvboost_rag.KVBoostEngine.from_pretrained` takes it.
    methods
        ``full``, ``prefix-cache``, ``joint`` (full prefill of the prompt tokenised as one text) and specifications of
        repairs; ``full`` must be among them.
    limit
        How many samples, from the beginning of the file; None for all.
    max_documents
        How many documents a sample keeps; see :func:`kvboost_rag.bench.data.fitted`.
    max_document_tokens
        Where each document is cut.
    fill_tokens
        Tokens of documents in each prompt, with other samples' documents; see :func:`kvboost_rag.bench.data.filled`.
    layout
        ``completion`` or ``chat``, see :mod:`kvboost_rag.layouts`. Full prefill answers the questions of
        HotpotQA better by far as a completion, with small models and plain instructions at least.
    instruction
        Text after the documents instead of the layout's own, with ``{question}``.
    repeats
        How often each TTFT is measured; the median counts.
    context_documents
        Text file whose paragraphs (between blank lines) every document is encoded after, side by side; ``generic``
        takes the texts that come along.
    threads
        Of torch; None leaves them alone.
    seed
        Of ``random`` repairs that name none. Nothing else is random: all decoding is greedy.
    dtype, device
        Of the weights; None leaves them to the loader.
    policy
        What ``auto`` chooses from, as ``kvboost-rag calibrate`` writes it; None takes the one that comes along.
    kv_dtype
        What documents' KV is stored as, see :data:`kvboost_rag.quantize.KV_DTYPES`.
    sink_tokens
        First tokens of each document that stay native then; None takes the default.
    ingest_rates
        Whether to compare ingest with plain prefill beforehand, which takes a few minutes with a larger model.

    Raises
    ------
    ValueError
        Naming the option and what it takes.
    """

    data: Path
    output: Path
    model: str = "smollm2"
    methods: tuple[str, ...] = METHODS
    limit: int | None = None
    max_documents: int | None = None
    max_document_tokens: int | None = None
    fill_tokens: int | None = None
    layout: str = "completion"
    instruction: str | None = None
    repeats: int = 1
    context_documents: Path | None = None
    threads: int | None = None
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    policy: Path | None = None
    kv_dtype: str = "native"
    sink_tokens: int | None = None
    ingest_rates: bool = True

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        _check_methods(self.methods)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; pass a whole number of at least 1, or leave it out")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; pass one of {', '.join(LAYOUTS)}")
        if self.instruction is not None and "{question}" not in self.instruction:
            raise ValueError("instruction must hold {question}, the place of the question")
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype is {self.dtype!r}; pass one of {', '.join(_DTYPES)}")
        KVFormat(self.kv_dtype, self.sink_tokens)
        _check_file("data", self.data)
        if self.context_documents not in (None, _GENERIC):
            _check_file("context_documents", self.context_documents)
        if self.policy is not None:
            _check_file("policy", self.policy)
        if not self.output.parent.is_dir():
            raise ValueError(f"the folder of output {self.output} does not exist; make it, or choose another one")
        if self.output.is_dir():
            raise ValueError(f"output {self.output} is a folder; name a file in it")

    @property
    def prompt_layout(self) -> Layout:
        """The layout itself, with the instruction in it."""
        layout = LAYOUTS[self.layout]
        return layout if self.instruction is None else replace(layout, question=f"\n\n{self.instruction}")

    @property
    def model_name(self) -> str:
        """The model without the folders it lies in; a model id as it is."""
        return Path(self.model).resolve().name if Path(self.model).exists() else self.model

    @property
    def loaded_policy(self) -> Policy | None:
        """The policy itself."""
        return None if self.policy is None else Policy.load(self.policy)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype itself."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    @property
    def context_texts(self) -> tuple[str, ...]:
        """Paragraphs of the file ``context_documents``."""
        if self.context_documents is None:
            return ()
        if self.context_documents == _GENERIC:
            return CONTEXT_TEXTS
        text = self.context_documents.read_text(encoding="utf-8")
        paragraphs = tuple(p.strip() for p in re.split(r"\n[ \t]*\n", text) if p.strip())
        if not paragraphs:
            raise ValueError(f"context_documents {self.context_documents} holds no text; leave the option out")
        return paragraphs

    def as_json(self) -> dict[str, Any]:
        """Give every option that bears on the figures, as JSON can hold it; of paths the last part only."""
        values = {name: v.name if isinstance(v, Path) else v for name, v in asdict(self).items()}
        values["model"] = self.model_name
        del values["output"]
        return values | {"methods": list(self.methods)}


def _check_methods(methods: Sequence[str]) -> None:
    if "full" not in methods:
        raise ValueError("methods must hold full, which the others are compared with; add it")
    twice = sorted({m for m in methods if methods.count(m) > 1})
    if twice:
        raise ValueError(f"methods hold {', '.join(twice)} more than once; name each once")
    for method in methods:
        if method not in BASELINES:
            try:
                parse_repair(method)
            except ValueError as error:
                known = ", ".join(BASELINES)
                raise ValueError(f"method {method!r} is neither one of {known} nor a repair: {error}") from error


def _check_file(name: str, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{name} {path} is not a file; pass the path of one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser; :func:`options_from` reads them."""
    for name, extra in _arguments():
        parser.add_argument(name, **extra)


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--data", {"type": Path, "required": True, "help": "JSON lines: id, question, documents, answers, choices"}
    yield "--output", {"type": Path, "required": True, "help": "JSON file for the figures"}
    yield "--model", {"default": "smollm2", "help": "folder, GGUF file or model id (default smollm2)"}
    yield "--methods", {"default": ",".join(METHODS), "help": "with commas between them (default %(default)s)"}
    yield "--limit", {"type": int, "help": "first so many samples (default: all)"}
    yield "--max-documents", {"type": int, "help": "documents per sample (default: all); those with an answer first"}
    yield "--max-document-tokens", {"type": int, "help": "cut each document here (default: nowhere)"}
    yield "--fill-tokens", {"type": int, "help": "other samples' documents up to so many tokens (default: none)"}
    yield "--layout", {"choices": tuple(LAYOUTS), "default": "completion", "help": "of the prompt (default completion)"}
    yield "--instruction", {"help": "text after the documents, with {question} (default: the layout's)"}
    yield "--repeats", {"type": int, "default": 1, "help": "TTFT measurements; the median counts (default 1)"}
    yield "--context-documents", {"type": Path, "help": "text file to encode documents after, or generic"}
    yield "--policy", {"type": Path, "help": "what auto chooses from (default: what comes along)"}
    yield "--kv-dtype", {"choices": KV_DTYPES, "default": "native", "help": "of the stored KV (default native)"}
    yield "--sink-tokens", {"type": int, "help": f"first tokens of a document that stay native (default {SINK_TOKENS})"}
    yield "--threads", {"type": int, "help": "threads of torch"}
    yield "--seed", {"type": int, "default": 0, "help": "of random repairs (default 0)"}
    yield "--dtype", {"choices": _DTYPES, "help": "of the weights"}
    yield "--device", {"help": "cpu (default), cuda or mps"}
    yield "--plot", {"type": Path, "help": "PNG or SVG file for the frontier: KL and F1 against TTFT"}


def options_from(args: argparse.Namespace) -> BenchOptions:
    """Make options of parsed arguments.

    Raises
    ------
    ValueError
        See :class:`BenchOptions`.
    """
    values = {name: getattr(args, name) for name in BenchOptions.__dataclass_fields__ if hasattr(args, name)}
    methods = tuple(m.strip() for m in args.methods.split(",") if m.strip())
    return BenchOptions(**values | {"methods": methods})
