"""The sensitivity that is stored with a document is what another context changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.contexts import head_ids, text_ids
from kvboost_rag.generic_texts import PROBE_TEXT
from kvboost_rag.model import ModelRunner
from kvboost_rag.prompt import Layout
from kvboost_rag.sensitivity import SensitivityMeter
from kvboost_rag.types import Placement, Plan

TEXTS = ["It was seven.", "The zebra ran over the plain. It was fast and striped, and it saw a lion there."]


def encoded_values(runner: ModelRunner, context: list[int], own: list[int]) -> torch.Tensor:
    """``[layers, kv_heads, tokens, head_dim]`` by one forward over everything."""
    ids = torch.tensor(context + own)
    cache, positions = runner.new_cache(len(ids)), torch.arange(len(ids))
    runner.encode(ids[None], positions, positions, cache, len(ids))
    return cache.values[:, 0, :, len(context) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_relative_change_of_the_values_of_layers_1_and_2(family):
    runner = ModelRunner(tiny_model(family))
    one, other, documents = [3, 4, 5], [9, 8, 7, 6, 5], [[10, 20, 30, 40], [50, 60]]
    values = [encoded_values(runner, one, own) for own in documents]
    expected = []
    for own, here in zip(documents, values, strict=True):
        there = encoded_values(runner, other, own)
        size = here[1:3].square().sum(dim=(1, 3)).mean(-1, keepdim=True)
        expected.append(((there - here)[1:3].square().sum(dim=(1, 3)) / size).mean(dim=0))
    padded = [torch.nn.functional.pad(v, (0, 0, 0, 4 - v.shape[2])) for v in values]
    ids = torch.tensor([[10, 20, 30, 40], [50, 60, 60, 60]])
    got = SensitivityMeter(runner, np.array(other)).measure(ids, [4, 2], torch.stack(padded, dim=1))
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        assert (g - e).abs().max() < 1e-4
        assert g.min() > 0


def test_after_the_same_context_nothing_changes():
    runner = ModelRunner(tiny_model("llama"))
    values = encoded_values(runner, [3, 4, 5], [10, 20, 30])
    (got,) = SensitivityMeter(runner, np.array([3, 4, 5])).measure(torch.tensor([[10, 20, 30]]), [3], values[:, None])
    assert got.max() < 1e-9


def stored(engine: KVBoostEngine, document_id: str) -> torch.Tensor:
    chunks = next(r.chunks for r in engine._registry if r.document.id == document_id)
    return torch.cat([engine._store.get(c.key.prefix, c.token_ids).sensitivity for c in chunks])


@pytest.mark.parametrize(("contexts", "others"), [([], [PROBE_TEXT]), (["Another text stands here."], [])])
def test_it_is_kept_with_the_chunks_in_both_tiers(tmp_path, contexts, others):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    for _ in range(2):
        with KVBoostEngine(
            model, tokenizer, cache_dir=tmp_path, chunker=AdaptiveChunker(target=16), context_documents=contexts
        ) as engine:
            engine.add_documents(documents)
            one = engine._encoder.context.token_ids.tolist()
            parts = [text_ids(engine._renderer, engine._tokens, text) for text in others]
            other = np.concatenate([head_ids(engine._renderer, engine._tokens), *parts]).tolist()
            for document in documents:
                own = engine._tokens.document(document.text).tolist()
                here, there = (encoded_values(engine._runner, c, own)[1:3] for c in (one, other))
                size = here.square().sum(dim=(1, 3)).mean(-1, keepdim=True)
                expected = ((there - here).square().sum(dim=(1, 3)) / size).mean(dim=0)
                assert (stored(engine, document.id) - expected).abs().max() < 1e-4


def test_it_reaches_the_plan_at_the_placed_tokens_places():
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        engine.add_documents([Document(str(i), text) for i, text in enumerate(TEXTS)])
        (chunk,) = next(r.chunks for r in engine._registry if r.document.id == "1")
        entry = engine._store.get(chunk.key.prefix, chunk.token_ids)
        plan = Plan(np.zeros(40, dtype=np.int64), (), (Placement(10, entry, 7, 22),), 0)
        expected = torch.zeros(40)
        expected[10:25] = entry.sensitivity[7:22]
        assert torch.equal(plan.sensitivity, expected)


@pytest.mark.parametrize("text", [PROBE_TEXT, "Another text stands here."])
def test_without_a_head_the_other_context_is_a_text_that_is_no_context(text):
    layout = Layout(chat=False, lead_in="")
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), context_documents=[text], layout=layout) as engine:
        assert not engine._renderer.head
        engine.add_documents([Document("1", TEXTS[1])])
        assert stored(engine, "1").min() > 0
