"""The main job in one run: index documents, ask questions over retrieved ones, compare with full prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost_rag.demo_documents import demo_documents, demo_questions, read_folder
from kvboost_rag.embedding import Embedder
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.layouts import LAYOUTS, layout_name
from kvboost_rag.report import Result, strip
from kvboost_rag.retrieval import FaissRetriever
from kvboost_rag.types import Document

__all__ = ["DEMO_DOCUMENTS_A_PROMPT", "Answered", "Demo", "DemoOptions", "ask_all", "prepare"]

# What the embedded model answered best with, among those tried; it gets lost in more documents.
DEMO_DOCUMENTS_A_PROMPT = 2


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs on.

    Parameters
    ----------
    model
        As :func:`kvboost_rag.loading.load_model` takes it.
    docs
        Folder of the reader's own documents; None takes the paragraphs that ship with the package.
    questions
        Questions to ask; none takes those that ship with the package, or the documents' own sentences.
    k
        Documents per question; None takes what the embedded model copes with, and 4 for any other.
    max_tokens
        Length of an answer; it ends at the end of a line.
    repair
        Specification of the repair.
    cache_dir
        Where KV is kept for the next start; None keeps it in memory.
    """

    model: str = "smollm2"
    docs: Path | None = None
    questions: tuple[str, ...] = ()
    k: int | None = None
    max_tokens: int = 32
    repair: str = "auto"
    cache_dir: Path | None = None

    @property
    def embedded(self) -> bool:
        """Whether the model is the small one that comes as a package, which needs a prompt of its own."""
        return self.model == "smollm2"


@dataclass(frozen=True)
class Answered:
    """One question, answered twice.

    Parameters
    ----------
    question, order
        What was asked, and how the retrieved documents were ordered.
    sources
        Ids in the order in which they stood in the prompt.
    expected
        Right answers, where they are known.
    reused, full
        With reuse, and by full prefill of the same tokens.
    """

    question: str
    order: str
    sources: tuple[str, ...]
    expected: tuple[str, ...]
    reused: Result
    full: Result

    def record(self) -> dict[str, Any]:
        """Everything a program may want, for JSON."""
        report = self.reused.report
        return {
            "question": self.question,
            "order": self.order,
            "sources": list(self.sources),
            "expected": list(self.expected),
            "answer": self.reused.text,
            "full_prefill_answer": self.full.text,
            "ttft_ms": report.ttft * 1000,
            "full_prefill_ttft_ms": self.full.report.ttft * 1000,
            "prompt_tokens": report.prompt_tokens,
            "tokens": {kind.value: report.tokens(kind) for kind in type(report.spans[0].kind)},
            "strip": strip(report.spans),
        }


@dataclass(frozen=True, eq=False)
class Demo:
    """A loaded engine with its documents and the questions to ask."""

    engine: KVBoostEngine
    retriever: FaissRetriever
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    options: DemoOptions


def prepare(options: DemoOptions, *, show_progress: bool = False) -> Demo:
    """Load the model, index the documents and embed them.

    Raises
    ------
    ValueError
        If the folder holds no readable text, the model can not be loaded, or a number is out of range.
    """
    if options.k is not None and options.k < 1:
        raise ValueError(f"k is {options.k}; ask for at least 1 document")
    documents = read_folder(options.docs) if options.docs else demo_documents()
    retriever = FaissRetriever(documents, Embedder())
    engine = KVBoostEngine.from_pretrained(
        options.model,
        repair=options.repair,
        cache_dir=options.cache_dir,
        layout=LAYOUTS[layout_name(options.model)],
    )
    engine.add_documents(documents, show_progress=show_progress)
    return Demo(engine, retriever, _questions(options, documents), options)


def _questions(options: DemoOptions, documents: Sequence[Document]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if options.questions:
        return tuple((question, ()) for question in options.questions)
    if options.docs is None:
        return tuple((q.question, q.answers) for q in demo_questions())
    return tuple((f"What does this say: {d.text.split('.')[0][:120]}?", ()) for d in documents[:4])


def ask_all(demo: Demo) -> Iterator[Answered]:
    """Ask every question with the best document last, then the first two again in the opposite order."""
    turns = [(q, "best last") for q in demo.questions] + [(q, "best first") for q in demo.questions[:2]]
    k = demo.options.k or (DEMO_DOCUMENTS_A_PROMPT if demo.options.embedded else 4)
    for (question, expected), order in turns:
        found = [document for document, _ in demo.retriever.retrieve(question, k)]
        if order == "best last":
            found.reverse()
        reused, full = (_ask(demo, question, found, reuse) for reuse in (True, False))
        yield Answered(question, order, tuple(d.id for d in found), expected, reused, full)


def _ask(demo: Demo, question: str, documents: Sequence[Document], reuse: bool) -> Result:
    return demo.engine.generate(
        question, documents=documents, max_tokens=demo.options.max_tokens, temperature=0.0, stop="\n", reuse=reuse
    )
