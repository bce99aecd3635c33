"""A whole benchmark run, from the question file to the figures."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvboost_rag.bench.data import Sample, filled, fitted, read_samples
from kvboost_rag.bench.measure import Meter
from kvboost_rag.bench.methods import ANSWER_TOKENS, KEPT_PROMPTS, Question, make_method, token_ids
from kvboost_rag.bench.options import BenchOptions
from kvboost_rag.bench.partial import Partial, write_json
from kvboost_rag.bench.setup import build_engine, describe, ingest_rates
from kvboost_rag.bench.summary import summarise
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.errors import ContextWindowError
from kvboost_rag.progress import progress
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Document

__all__ = ["run_bench"]

logger = logging.getLogger("kvboost_rag.bench")


def run_bench(options: BenchOptions, *, show_progress: bool | None = None) -> dict[str, Any]:
    """Measure every method on every sample and write the figures as JSON.

    An interrupted run goes on from its last finished sample when it is started again with the same options. With a
    ``limit`` of samples that are finished, it gives their figures at once and keeps the others for later.

    Parameters
    ----------
    options
        What to measure.
    show_progress
        See :func:`kvboost_rag.progress.progress`.

    Returns
    -------
    dict[str, Any]
        ``summary``, ``full_failures`` and ``ingest`` (see :func:`kvboost_rag.bench.summary.summarise`), ``setup``, and
        ``samples`` with every sample's figures. The same is in ``options.output``.

    Raises
    ------
    ValueError
        For data, a model or options that can not be used, a prompt over the context window, or the left-overs of
        another run beside the output.
    """
    # What fills a prompt does not depend on how many samples are measured.
    read = read_samples(options.data, options.limit if options.fill_tokens is None else None)
    if options.limit is not None and len(read) < options.limit:
        logger.warning("%s holds %d samples, not %d", options.data, len(read), options.limit)
    with _threads(options.threads), build_engine(options) as engine:
        samples = _prepared(engine, read, options)
        identity, partial = describe(options, engine), Partial(options.output)
        measured, records = partial.read(identity)
        if measured is None:
            documents = [d for s in samples for d in s.documents]
            measured = {"ingest_rates": ingest_rates(engine, documents) if options.ingest_rates else None}
            partial.start(identity, measured)
        _measure(engine, samples, options, partial, records, show_progress)
    is_whole, records = len(records) == len(samples), records[: len(samples)]
    rates = measured["ingest_rates"]
    setup = identity | {"ingest_ratio": rates and rates["ratio"], "ingest_rates": rates}
    result = {**summarise(records, options.methods), "setup": setup, "samples": records}
    write_json(options.output, result)
    if is_whole:
        partial.remove()
    return result


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepared(engine: KVBoostEngine, samples: Sequence[Sample], options: BenchOptions) -> list[Sample]:
    """Fit every sample to the options and see that its prompt fits the model, before anything is measured."""
    tokens = Tokens(engine.tokenizer)
    own = [fitted(sample, tokens, options.max_documents, options.max_document_tokens) for sample in samples]
    out = filled(own, tokens, options.fill_tokens)[: options.limit]
    for sample in out:
        try:
            token_ids(engine, Question(sample.prompt, sample.documents), ANSWER_TOKENS)
        except ContextWindowError as error:
            remedy = "see --max-documents, --max-document-tokens and --fill-tokens"
            raise ValueError(f"sample {sample.id!r}: {error}; {remedy}") from error
    return out


def _measure(
    engine: KVBoostEngine,
    samples: Sequence[Sample],
    options: BenchOptions,
    partial: Partial,
    records: list[dict[str, Any]],
    show_progress: bool | None,
) -> None:
    """Add the missing records."""
    done = len(records)
    if done >= len(samples):
        return
    methods = {name: make_method(name, engine, options.seed) for name in options.methods}
    meter = Meter(engine, methods, options.repeats)
    meter.warm_up(samples[done], _warm_up_question(samples[done]))
    meter.recall(samples[max(0, done - KEPT_PROMPTS) : done])
    for index in progress(range(done, len(samples)), "measuring", "sample", show_progress):
        following = samples[index + 1] if index + 1 < len(samples) else None
        record = meter.measure(samples[index], index, following)
        partial.append(record)
        records.append(record)


def _warm_up_question(sample: Sample) -> Question:
    """Make a prompt of about the same length: the same words backwards, a few left out lest it exceed the window."""
    documents = tuple(Document(f"warm-up {i}", _backwards(d.text)) for i, d in enumerate(sample.documents))
    return Question(_backwards(sample.prompt), documents)


def _backwards(text: str) -> str:
    words = text.split()
    return " ".join(reversed(words[: max(1, len(words) * 9 // 10)]))
