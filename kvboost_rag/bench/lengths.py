"""Time to the first token against the number of documents in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost_rag.bench.methods import Question, make_method
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.progress import progress
from kvboost_rag.types import Document

__all__ = ["TimedPrompt", "time_prompts"]


@dataclass(frozen=True)
class TimedPrompt:
    """One timed first token.

    Parameters
    ----------
    method
        ``full``, ``prefix-cache`` or the specification of a repair.
    documents, document_tokens
        In the prompt.
    prompt_tokens
        All of them.
    seconds
        To the first token.
    """

    method: str
    documents: int
    document_tokens: int
    prompt_tokens: int
    seconds: float


def time_prompts(
    engine: KVBoostEngine,
    question: str,
    documents: Sequence[Document],
    counts: Sequence[int],
    methods: Sequence[str] = ("full", "prefix-cache", "auto"),
    *,
    repeats: int = 2,
    show_progress: bool | None = None,
) -> list[TimedPrompt]:
    """Time prompts of growing length, all methods side by side.

    Every prompt begins with another document, as retrieval makes it, so that prefix caching finds the head alone.

    Parameters
    ----------
    engine
        Gets to know the documents.
    question
        Behind the documents.
    documents
        As many as the largest count, and one for each prompt to begin with, the first one included.
    counts
        Numbers of documents in a prompt.
    methods
        As for :func:`kvboost_rag.bench.run_bench`.
    repeats
        Prompts of each length. One more, not counted, comes first to warm up.
    show_progress
        See :func:`kvboost_rag.progress.progress`.

    Raises
    ------
    ValueError
        If there are too few documents, or nothing is to be measured.
    """
    if not counts or min(counts) < 1 or repeats < 1:
        raise ValueError(f"counts {list(counts)} and repeats {repeats} measure nothing; ask for at least 1 of each")
    sizes = [min(counts), *(count for count in counts for _ in range(repeats))]
    needed = max(max(counts), len(sizes))
    if len(documents) < needed:
        raise ValueError(f"{len(documents)} documents are too few for these prompts; give at least {needed}")
    engine.add_documents(documents)
    ways = {name: make_method(name, engine, seed=0) for name in methods}
    out = []
    for turn, count in progress(list(enumerate(sizes)), "timing", "prompt", show_progress):
        chosen = tuple(documents[(i + turn) % len(documents)] for i in range(count))
        tokens = sum(len(engine.tokenizer(d.text, add_special_tokens=False).input_ids) for d in chosen)
        for name, way in ways.items():
            first = way.first_token(Question(question, chosen))
            way.finish()
            out.append(TimedPrompt(name, count, tokens, first.prompt_tokens, first.seconds))
    return out[len(ways) :]
