"""How much of the retrieved text each response mode of LlamaIndex leaves reusable: the table of docs/llama_index.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llama_index.core import VectorStoreIndex, get_response_synthesizer
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMPredictStartEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import TextNode
from llama_index.llms.kvboost import KVBoostLLM, KVBoostSynthesizer, MiniLMEmbedding, add_nodes, collect_reports

from kvboost_rag import Document, KVBoostEngine, Report, SpanKind
from kvboost_rag.demo_documents import demo_documents, demo_questions

MODES = ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate")
TOP_K = 6
# Templates, answer and padding leave room for some of the nodes only.
SMALL_WINDOW = 1200


class Contexts(BaseEventHandler):
    """Keeps what a synthesizer puts into each prompt as its context."""

    texts: list[str] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Look at the arguments of a prompt template."""
        if isinstance(event, LLMPredictStartEvent):
            arguments = event.template_args or {}
            self.texts.append(str(arguments.get("context_str", arguments.get("context_msg"))))


@dataclass
class Observed:
    """What one query sent to the model."""

    contexts: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def share(self, llm: KVBoostLLM) -> float:
        """Share of the contexts' tokens whose KV was taken from the store."""
        spans = [span for report in self.reports for span in report.spans]
        reused = sum(s.tokens for s in spans if s.document_id and s.kind is not SpanKind.COMPUTED)
        return reused / sum(len(llm.token_ids(text)) for text in self.contexts)


@contextmanager
def observe() -> Iterator[Observed]:
    """Watch what is sent to the model inside a ``with`` block."""
    root, contexts = get_dispatcher(), Contexts(texts=[])
    root.add_event_handler(contexts)
    try:
        with collect_reports() as reports:
            yield Observed(contexts.texts, reports)
    finally:
        root.event_handlers.remove(contexts)


def demo_index(documents: Sequence[Document]) -> VectorStoreIndex:
    """Index documents under real embeddings."""
    nodes = [TextNode(id_=d.id, text=d.text, metadata=dict(d.metadata)) for d in documents]
    return VectorStoreIndex(nodes, embed_model=MiniLMEmbedding())


def synthesizer(mode: str, llm: KVBoostLLM, window: int | None = None) -> BaseSynthesizer:
    """Make the synthesizer of a mode; ``whole nodes`` is this project's own."""
    helper = llm.prompt_helper()
    if window is not None:
        helper = PromptHelper(window, helper.num_output, tokenizer=llm.token_ids)
    if mode == "whole nodes":
        return KVBoostSynthesizer(llm, prompt_helper=helper)
    return get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=mode)


def main() -> None:
    """Print the table."""
    index = demo_index(demo_documents())
    questions = [q.question for q in demo_questions()][:4]
    with KVBoostEngine.from_pretrained("smollm2", max_prefix_bytes=0) as engine:
        add_nodes(engine, index.docstore.docs.values())
        llm = KVBoostLLM(engine=engine, max_tokens=16, temperature=0, repair="none")
        print(f"| response mode | reused, window {llm.metadata.context_window} | reused, window {SMALL_WINDOW} |")
        print("|---|---|---|")
        for mode in (*MODES, "whole nodes"):
            cells = []
            for window in (None, SMALL_WINDOW):
                chain = RetrieverQueryEngine(
                    index.as_retriever(similarity_top_k=TOP_K), synthesizer(mode, llm, window)
                )
                with observe() as observed:
                    for question in questions:
                        chain.query(question)
                cells.append(f"{observed.share(llm):.3f} ({len(observed.reports) / len(questions):.1f} calls)")
            print(f"| {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
