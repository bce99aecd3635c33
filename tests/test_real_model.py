"""The exact limits and the main job on the real small model."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag import KVBoostEngine, SpanKind
from kvboost_rag.demo_documents import demo_documents

pytestmark = pytest.mark.real
ANSWER = [504, 2988, 314, 253, 2038, 282, 260, 905]


@pytest.fixture(scope="module")
def engine(smollm2):
    with KVBoostEngine(*smollm2) as made:
        made.add_documents(demo_documents()[:4])
        yield made


@pytest.fixture(scope="module")
def ids(engine):
    return [d.id for d in engine.documents]


def gap(engine, documents, repair):
    options = {"documents": documents}
    got = engine.score("What is this about?", ANSWER, repair=repair, **options)
    full = engine.score("What is this about?", ANSWER, reuse=False, **options)
    return got, float((got.logits - full.logits).abs().max())


@pytest.mark.parametrize("repair", ["random:1.0", "cacheblend:1.0"])
def test_limit_1_recomputing_everything_equals_full_prefill(engine, ids, repair):
    _, difference = gap(engine, [ids[2], ids[0], ids[1]], repair)
    assert difference < 1e-3


def test_limit_2_a_document_after_its_head_is_exact(engine, ids):
    got, difference = gap(engine, ids[1:2], "none")
    assert got.report.tokens(SpanKind.APPROXIMATE) == 0
    assert {s.kind for s in got.report.spans if s.document_id} == {SpanKind.EXACT}
    assert difference < 1e-3


def test_repair_brings_reuse_closer_to_full_prefill(engine, ids):
    gaps = [gap(engine, [ids[2], ids[0], ids[1]], repair)[1] for repair in ("none", "selective:48", "random:1.0")]
    assert gaps[0] > gaps[1] > gaps[2]


def test_limit_5_streamed_whole_and_plain_generate_agree(engine, ids, smollm2):
    model, tokenizer = smollm2
    prompt, options = "The capital of France is", {"max_tokens": 12, "temperature": 0.0}
    whole = engine.generate(prompt, **options)
    assert "".join(delta.text for delta in engine.stream(prompt, **options)) == whole.text
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs.input_ids.shape[1] :]
    assert list(whole.token_ids) == expected.tolist()
    assert "Paris" in whole.text


def test_limit_6_accounting_equals_the_real_bytes(engine):
    config = engine.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert per_token == 46080
    stats = engine.stats
    # Besides, eight bytes of token id and four of sensitivity.
    assert stats.store_bytes == stats.document_tokens * (per_token + 8 + 4)


def test_a_document_tokenises_alike_wherever_it_stands(engine, ids):
    text = engine.documents[0].text
    alone = engine._registry.get(ids[0])
    for prompt in (f"Read this:\n\n{text}\n\nWhat is it?", [{"role": "user", "content": f"[1] {text} [2]"}]):
        report = engine.generate(prompt, max_tokens=1).report
        assert sum(s.tokens for s in report.spans if s.document_id == ids[0]) == alone.tokens
    assert torch.equal(torch.as_tensor(engine.tokenize("x")), torch.as_tensor(engine.tokenizer("x").input_ids))
