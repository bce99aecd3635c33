"""A tiny model with adapters, and what the tests of states ask of an engine over it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, Scored, SpanKind
from kvboost_rag.chunking import AdaptiveChunker

TEXTS = {
    "zebra": "The zebra ran over the plain. It was fast and striped, and it saw a lion.\n\nThen it ran home.",
    "music": "A fugue begins with one voice alone. Others join, one by one, each with the same theme.",
}
DOCUMENTS = [Document(i, t) for i, t in TEXTS.items()]
ANSWER = list(b"It ran home, I think.")
TARGETS = ["q_proj", "k_proj", "v_proj", "down_proj"]


def lora(seed: int, **options):
    """Configuration of an adapter that changes the KV from the start."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **options)


def adapted(*names: str, family: str = "llama"):
    """A ``PeftModel`` with these adapters, the first one active; each has weights of its own, the same every time."""
    peft = pytest.importorskip("peft")
    first, *others = names
    model = peft.get_peft_model(deepcopy(tiny_model(family)), lora(ord(first)), adapter_name=first)
    for name in others:
        model.add_adapter(name, lora(ord(name)))
    return model.eval()


def make_engine(model, **options) -> KVBoostEngine:
    if options.get("reuse") != "off":
        options["chunker"] = AdaptiveChunker(target=24)
    return KVBoostEngine(model, tiny_tokenizer(), **options)


def scored(engine: KVBoostEngine, documents=("zebra",), **options) -> Scored:
    return engine.score("Why did it run?", ANSWER, documents=list(documents), **options)


def stored_tokens(engine: KVBoostEngine, documents=("music", "zebra")) -> int:
    """How many tokens of documents come out of the store."""
    spans = scored(engine, documents, repair="none").report.spans
    kinds = (SpanKind.EXACT, SpanKind.APPROXIMATE)
    return sum(s.tokens for s in spans if s.document_id is not None and s.kind in kinds)


def distance_to_full(engine: KVBoostEngine) -> float:
    """How far a document right behind its canonical head is from full prefill: nothing, whatever the weights are."""
    return float((scored(engine, repair="none").logits - scored(engine, reuse=False).logits).abs().max())
