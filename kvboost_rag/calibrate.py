"""Measure the frontier of a model on the user's own documents, and leave it to ``repair="auto"``."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kvboost_rag.bench import BASELINES, BenchOptions, run_bench
from kvboost_rag.cards import calibration_card
from kvboost_rag.layouts import layout_name
from kvboost_rag.policy import Policy, PolicyPoint
from kvboost_rag.store import make_folder
from kvboost_rag.types import Document

__all__ = [
    "CALIBRATED", "Calibration", "calibrate", "calibrate_documents", "digest", "questions_from", "to_policy",
    "write_samples",
]  # fmt: skip

CALIBRATED = (
    "none", "selective:4+sensitive:0.05", "selective:8+sensitive:0.08", "selective:16+sensitive:0.15",
    "selective:16+sensitive:0.3", "selective:16+sensitive:0.5",
)  # fmt: skip
"""Methods that a calibration measures beside full prefill."""

_SENTENCE = re.compile(r"[^.!?\n]{20,160}[.!?]")


@dataclass(frozen=True)
class Calibration:
    """What a calibration found.

    Parameters
    ----------
    policy
        As it was saved.
    path
        Where.
    result
        Of :func:`kvboost_rag.bench.run_bench`.
    """

    policy: Policy
    path: Path = field(repr=False)
    result: dict[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        """Draw the measured methods for notebooks."""
        return calibration_card(self.result["summary"], self.policy.source, self.path.name, self.policy.choices)


def questions_from(documents: Sequence[Document], samples: int, k: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make samples from plain documents: each asks for a sentence of one of its documents.

    Parameters
    ----------
    documents
        At least two; those without a sentence are not asked about, but stand beside others.
    samples, k
        How many samples, and how many documents each holds.
    seed
        Of the choice and the order.

    Returns
    -------
    list[dict[str, Any]]
        In the schema of :func:`kvboost_rag.bench.data.read_samples`.

    Raises
    ------
    ValueError
        If there are too few documents, or none holds a sentence.
    """
    if k < 2 or samples < 1:
        raise ValueError(f"k is {k} and samples is {samples}; ask for 2 documents a question and 1 question at least")
    if len(documents) < 2:
        raise ValueError(f"a calibration needs at least 2 documents, not {len(documents)}; give more")
    chance = random.Random(seed)
    sentences = [(d, s) for d in documents for s in _SENTENCE.findall(d.text)]
    if not sentences:
        raise ValueError("no document holds a sentence of 20 to 160 characters; pass questions with --data")
    out = []
    for number in range(samples):
        document, sentence = chance.choice(sentences)
        others = [d for d in documents if d.id != document.id]
        chosen = [document, *chance.sample(others, min(k - 1, len(others)))]
        chance.shuffle(chosen)
        out.append(
            {
                "id": f"{number}", "task": "calibration",
                "question": f"Which text says this, and what else does it say: {sentence.strip()}",
                "documents": [{"title": "", "text": d.text} for d in chosen],
                "answers": [sentence.strip()], "choices": None,
            }  # fmt: skip
        )
    return out


def calibrate(options: BenchOptions, folder: Path, *, show_progress: bool | None = None) -> Calibration:
    """Measure and save a policy beside the cache.

    Parameters
    ----------
    options
        What to measure; ``methods`` hold ``full`` and the repairs to choose from.
    folder
        The ``cache_dir`` of the engines that are to use it.
    show_progress
        As for :func:`kvboost_rag.bench.run_bench`.
    """
    if not set(options.methods) - set(BASELINES):
        raise ValueError("a calibration needs repairs among its methods; name at least one")
    make_folder(folder)
    result = run_bench(options, show_progress=show_progress)
    policy = to_policy(result["summary"], f"calibrated on {options.data.name}")
    path = folder / f"policy-{result['setup']['context_key']}.json"
    policy.save(path)
    return Calibration(policy, path, result)


def calibrate_documents(
    documents: Sequence[Document],
    folder: Path,
    *,
    model: str = "smollm2",
    samples: int = 8,
    k: int = 4,
    methods: Sequence[str] = CALIBRATED,
    max_document_tokens: int | None = None,
    layout: str | None = None,
    context_documents: Path | None = None,
    threads: int | None = None,
    show_progress: bool | None = None,
) -> Calibration:
    """Calibrate with questions made from documents: which repair is worth what on them.

    An interrupted calibration goes on when it is called again with the same arguments.

    Parameters
    ----------
    documents, samples, k
        As for :func:`questions_from`.
    folder
        The ``cache_dir`` of the engines that are to use what is found; made if it is not there.
    model, max_document_tokens, context_documents, threads
        As for :class:`kvboost_rag.bench.BenchOptions`.
    methods
        Repairs to choose from.
    layout
        By name; None takes the one that suits the model.
    show_progress
        As for :func:`kvboost_rag.bench.run_bench`.

    Raises
    ------
    ValueError
        As :func:`questions_from` and :class:`kvboost_rag.bench.BenchOptions`.
    """
    questions = questions_from(documents, samples, k)
    # Named by what is asked, so that another calibration neither disturbs this one nor takes up its left-overs.
    asked = (questions, model, layout, list(methods), max_document_tokens, str(context_documents), threads)
    name = f"calibration-{digest(asked)}"
    make_folder(folder)
    write_samples(questions, folder / f"{name}.jsonl")
    options = BenchOptions(
        data=folder / f"{name}.jsonl", output=folder / f"{name}.json", model=model, methods=("full", *methods),
        max_document_tokens=max_document_tokens, layout=layout or layout_name(model), threads=threads,
        context_documents=context_documents, ingest_rates=False,
    )  # fmt: skip
    return calibrate(options, folder, show_progress=show_progress)


def to_policy(summary: Mapping[str, Mapping[str, Any]], source: str) -> Policy:
    """Turn a benchmark's summary into a policy; the baselines are left out."""
    points = tuple(
        PolicyPoint(name, row["ttft_ratio"], row["kl"], row["kl_p95"], row["n"])
        for name, row in summary.items()
        if name not in BASELINES and not name.startswith("auto")
    )
    return Policy(points, source)


def digest(asked: Sequence[object]) -> str:
    """Short name of what a calibration asks, from values that JSON can hold."""
    return xxhash.xxh3_64_hexdigest(json.dumps(asked).encode())


def write_samples(samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write samples as JSON lines, whole or not at all."""
    writing = path.with_name(f".{path.name}.{os.getpid()}")
    writing.write_text("".join(json.dumps(row) + "\n" for row in samples), encoding="utf-8")
    os.replace(writing, path)
