"""The exact limits: where reuse must equal a full prefill, or a slow reference that uses no cache at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import reference_logits
from tiny import CORE, FAMILIES, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.answering import Asked, Clock
from kvboost_rag.canonical import CanonicalContext
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.encode import _batches
from kvboost_rag.keys import chain
from kvboost_rag.plan import BEHIND_HEAD, missed
from kvboost_rag.prompt import Layout
from kvboost_rag.quantize import KV_DTYPES
from kvboost_rag.repair import parse_repair
from kvboost_rag.store.codec import tensors_of
from kvboost_rag.types import SpanKind

TEXTS = {
    "zebra": "The zebra ran over the plain. It was fast and striped, and it saw a lion.\n\nThen it ran home.",
    "music": "A fugue begins with one voice alone. Others join, one by one, each with the same theme.",
    "rain": "Rain falls. Rivers rise! Who knows why the sea is never full, though all rivers run to it?",
}
DOCUMENTS = [Document(i, t) for i, t in TEXTS.items()]
ANSWER = list(b"It ran home, I think.")
# One text is a context as a prompt might have it; several are side by side, as no prompt has them.
CONTEXTS = (
    ["Another text stands here."],
    ["Another text stands here.", "A second one, which is longer than the first one is.", "Third."],
)
FULL = ("random:1.0", "cacheblend:1.0", "selective:100000", "question:1.0", "sensitive:1.0")


def make_engine(family: str, **options) -> KVBoostEngine:
    engine = KVBoostEngine(tiny_model(family), tiny_tokenizer(), chunker=AdaptiveChunker(target=24), **options)
    engine.add_documents(DOCUMENTS)
    return engine


kept_engine = cache(make_engine)


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest):
    with make_engine(request.param) as made:
        yield made


def full_logits(engine: KVBoostEngine, documents: list[str]) -> torch.Tensor:
    return engine.score("Why did it run?", ANSWER, documents=documents, reuse=False).logits


@pytest.mark.parametrize("repair", FULL)
def test_limit_1_recomputing_everything_equals_full_prefill(engine, repair):
    documents = ["music", "zebra", "rain", "zebra"]
    got = engine.score("Why did it run?", ANSWER, documents=documents, repair=repair)
    assert got.report.tokens(SpanKind.APPROXIMATE) == 0
    assert got.report.tokens(SpanKind.RECOMPUTED) > 150
    assert (got.logits - full_logits(engine, documents)).abs().max() < 1e-3


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("repair", FULL[:2])
def test_limit_1_holds_over_quantised_kv(family, kv_dtype, repair):
    engine = make_engine(family, kv_dtype=kv_dtype)
    for documents in (["music", "zebra", "rain", "zebra"], ["music"]):
        got = engine.score("Why did it run?", ANSWER, documents=documents, repair=repair)
        assert got.report.tokens(SpanKind.APPROXIMATE) == 0
        assert (got.logits - full_logits(engine, documents)).abs().max() < 1e-3


def test_limit_1_can_fail(engine):
    documents = ["music", "zebra", "rain", "zebra"]
    got = engine.score("Why did it run?", ANSWER, documents=documents, repair="none")
    assert (got.logits - full_logits(engine, documents)).abs().max() > 1e-2


def test_limit_2_a_document_after_its_canonical_head_is_exact(engine):
    got = engine.score("Why did it run?", ANSWER, documents=["zebra"], repair="none")
    report = got.report
    assert report.tokens(SpanKind.APPROXIMATE) == report.tokens(SpanKind.RECOMPUTED) == 0
    exact = {s.document_id: s.tokens for s in report.spans if s.kind is SpanKind.EXACT}
    assert exact["zebra"] == len(TEXTS["zebra"])
    assert exact[None] > 10
    assert (got.logits - full_logits(engine, ["zebra"])).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["gemma3", "smollm3"])
@pytest.mark.parametrize("kv_dtype", ["native", "int8"])
def test_layers_that_are_placed_a_few_at_a_time_are_placed_alike(family, kv_dtype, monkeypatch):
    """Tiny models fit one block, real ones take many."""
    with make_engine(family, kv_dtype=kv_dtype, max_prefix_bytes=0) as engine:
        asked = {"documents": ["music", "zebra"], "repair": "none"}
        expected = engine.score("Why?", ANSWER, **asked).logits
        monkeypatch.setattr("kvboost_rag.assemble._BLOCK", 2000)
        assert torch.allclose(engine.score("Why?", ANSWER, **asked).logits, expected, atol=1e-4)


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.6), ("int4", 6.0)])
def test_limit_2_a_quantised_document_is_close_and_says_so(family, kv_dtype, bound):
    engine = make_engine(family, kv_dtype=kv_dtype)
    got = engine.score("Why did it run?", ANSWER, documents=["zebra"], repair="none")
    (span,) = [s for s in got.report.spans if s.document_id == "zebra"]
    assert (span.kind, span.reason, span.tokens) == (
        SpanKind.APPROXIMATE, f"stored as {kv_dtype}", len(TEXTS["zebra"])
    )  # fmt: skip
    assert got.report.spans[0].kind is SpanKind.EXACT
    off = (got.logits - full_logits(engine, ["zebra"])).abs().max()
    assert 1e-4 < off < bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offset", [1, 57, 300])
def test_limit_3_rotated_keys_equal_fresh_ones(family, offset):
    engine = make_engine(family)
    runner = engine._runner
    ids = torch.from_numpy(engine._tokens.document(TEXTS["zebra"]))[None]
    tokens = ids.shape[1]
    slots = torch.arange(tokens)
    caches = [runner.new_cache(tokens) for _ in range(2)]
    runner.encode(ids, slots, slots, caches[0], tokens)
    runner.encode(ids, slots + offset, slots, caches[1], tokens)
    rotation = runner.architecture.rotation
    free = rotation.unrotate(caches[0].keys[:, 0], rotation.tables(0, tokens))
    moved = torch.empty_like(free)
    rotation.rotate_into(moved, free, rotation.tables(offset, offset + tokens))
    scale = caches[1].keys.abs().max()
    assert (moved - caches[1].keys[:, 0]).abs().max() < 1e-4 * max(1.0, scale)
    assert (caches[0].values - caches[1].values).abs().max() < 1e-4 * max(1.0, caches[1].values.abs().max())
    assert (caches[0].keys - caches[1].keys).abs().max() > 1e-2


@dataclass(frozen=True)
class Part:
    """A document (whole or cut) or other text in a generated prompt."""

    text: str


cut_documents = st.builds(
    lambda name, keep: Part(TEXTS[name][:keep].strip()),
    st.sampled_from(sorted(TEXTS)),
    st.integers(min_value=66, max_value=200),
)
gaps = st.sampled_from(["", "\n\n", " and ", "\n---\nSource: x\n", "unknown text "]).map(Part)
prompts = st.lists(st.one_of(cut_documents, gaps), min_size=1, max_size=6).map(
    lambda parts: "".join(p.text for p in parts) + "\nWhy?"
)


def planned(engine: KVBoostEngine, text: str):
    pieces = engine._composer.pieces(engine._renderer.render(text, (), {}), raw=True)
    ids = np.concatenate([piece.token_ids for piece in pieces])
    return engine._planner.plan(pieces, engine._prefixes.match(ids, "none"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repair", ["none", "selective:5", "random:0.3"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=prompts)
def test_limit_4_any_layout_equals_the_slow_reference(family, repair, text):
    engine = kept_engine(family)
    got = engine.score(text, ANSWER[:1], repair=repair)
    expected = reference_logits(engine, planned(engine, text), got.report.spans)
    assert (got.logits[0] - expected).abs().max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_limit_4_sees_a_wrong_position(family):
    engine, text = kept_engine(family), TEXTS["rain"] + "\n" + TEXTS["zebra"] + "\nWhy?"
    got = engine.score(text, ANSWER[:1], repair="none")
    assert got.report.tokens(SpanKind.APPROXIMATE) == len(TEXTS["rain"] + TEXTS["zebra"])
    right, wrong = (reference_logits(engine, planned(engine, text), got.report.spans, shift=s) for s in (0, 1))
    assert (got.logits[0] - right).abs().max() < 1e-3
    assert (got.logits[0] - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repair", ["none", "selective:5", "sensitive:0.2"])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=len)
def test_limit_1_first_tokens_right_behind_the_head_are_exact_after_another_context(family, repair, contexts):
    documents = ["zebra", "music", "zebra"]
    with make_engine(family, context_documents=contexts) as engine:
        got = engine.deviation("Why did it run?", documents=documents, repair=repair)
        (first,) = [s for s in got.spans if s.reason == BEHIND_HEAD]
        assert (first.kind, first.tokens, first.document_id) == (SpanKind.COMPUTED, 16, "zebra")
        deviations = torch.maximum(got.keys, got.values).amax(0)
        assert deviations[: first.end].max() < 1e-4
        approximate = [s for s in got.spans if s.kind is SpanKind.APPROXIMATE]
        assert approximate[0].document_id == "zebra"
        assert all(deviations[s.start : s.end].max() > 1e-3 for s in approximate)
        # Later prompts that begin alike may take these tokens, and no more, for full prefill's.
        engine.generate("Why did it run?", documents=documents, max_tokens=2, repair=repair)
        again = engine.generate("Where?", documents=documents[:1], max_tokens=1, repair="random:0.5").report.spans
        assert [s.tokens for s in again if s.kind is SpanKind.EXACT and s.document_id == "zebra"] == [16]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repair", ["none", "selective:5"])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=len)
def test_limit_4_the_rest_of_that_document_equals_the_slow_reference(family, repair, contexts):
    with make_engine(family, context_documents=contexts) as engine:
        documents = ["zebra", "music", "zebra"]
        asked = Asked("Why did it run?", documents, {}, parse_repair(repair), True, 0)
        request = engine._compose(asked, Clock())
        plan = engine._planner.plan(request.pieces, engine._prefixes.match(request.token_ids, repair))
        got = engine.score("Why did it run?", ANSWER[:1], documents=documents, repair=repair)
        right, wrong = (reference_logits(engine, plan, got.report.spans, shift=shift) for shift in (0, 1))
        assert (got.logits[0] - right).abs().max() < 1e-3
        assert (got.logits[0] - wrong).abs().max() > 2e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_limit_4_a_text_beside_itself_is_that_text_alone(family):
    made = [make_engine(family, context_documents=["Another text stands here."] * copies) for copies in (1, 3)]
    one, three = (
        [engine._store.get(c.key.prefix, c.token_ids) for r in engine._registry for c in r.chunks] for engine in made
    )
    assert len(one) >= len(DOCUMENTS)
    for a, b in zip(one, three, strict=True):
        assert a.chunk.key.prefix != b.chunk.key.prefix
        assert (a.keys - b.keys).abs().max() < 1e-4
        assert (a.values - b.values).abs().max() < 1e-4
        # What documents are compared with for their sensitivity is the head in both.
        assert (a.sensitivity - b.sensitivity).abs().max() < 1e-4


def test_no_text_beside_others_is_taken_for_a_chunk_behind_them():
    head, *texts = (np.array([i, i + 1]) for i in (3, 10, 20, 30))
    keys = [CanonicalContext.of("model", head, texts[:n]).key for n in range(4)]
    keys += [chain(CanonicalContext.of("model", head, texts[:n]).key, texts[n]) for n in range(3)]
    keys += [CanonicalContext.of("model", head, texts[::-1]).key, CanonicalContext.of("other", head, texts).key]
    # One behind the other, as a prompt might have them.
    keys += [CanonicalContext.of("model", head, [np.concatenate(texts)]).key]
    assert len(set(keys)) == len(keys)


def test_many_short_documents_share_a_forward_only_as_far_as_their_contexts_fit_into_memory():
    assert [len(batch) for batch in _batches([8] * 100, 0)] == [64, 36]
    assert max(len(batch) for batch in _batches([8] * 100, 1000)) == 8
    assert [len(batch) for batch in _batches([8] * 3, 10**6)] == [1] * 3


def test_first_tokens_behind_the_head_do_not_hide_that_the_rest_is_missing():
    with make_engine("llama", context_documents=["Another text."], max_memory_bytes=9, refill=False) as engine:
        spans = engine.score("Why?", ANSWER, documents=["zebra", "music"]).report.spans
        assert [s.tokens for s in spans if s.reason == BEHIND_HEAD] == [16]
        assert list(missed(spans)) == ["zebra", "music"]


def test_limit_1_without_a_context_nothing_is_computed_behind_the_head():
    spans = kept_engine("llama").score("Why?", ANSWER, documents=["zebra", "music"], repair="none").report.spans
    assert BEHIND_HEAD not in {s.reason for s in spans}


def test_limit_5_streamed_text_is_the_answer(engine):
    options = {"documents": ["music", "rain"], "max_tokens": 24, "temperature": 0.0}
    whole = engine.generate("Why?", **options)
    stream = engine.stream("Why?", **options)
    assert "".join(delta.text for delta in stream) == whole.text


@pytest.mark.parametrize("family", FAMILIES)
def test_limit_5_reuse_off_equals_generate(family):
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    text = "Once upon a time there was a " + TEXTS["zebra"]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :].tolist()
    for engine in (make_engine(family), KVBoostEngine(model, tokenizer, reuse="off")):
        result = engine.generate(text, max_tokens=24, temperature=0.0, reuse=False)
        assert list(result.token_ids) == [i for i in expected if i != tokenizer.eos_token_id]


def test_limit_5_exact_reuse_equals_generate(engine):
    options = {"documents": ["zebra"], "max_tokens": 24, "temperature": 0.0}
    assert engine.generate("Why?", **options).token_ids == engine.generate("Why?", reuse=False, **options).token_ids


@pytest.mark.parametrize("family", CORE)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_limit_6_memory_accounting_equals_the_real_bytes(family, kv_dtype):
    engine = make_engine(family, kv_dtype=kv_dtype)
    entries = [engine._store._entries[prefix] for prefix in engine._store]
    storages = [t.untyped_storage() for entry in entries for t in tensors_of(entry).values() if t.numel()]
    assert engine.stats.store_bytes == sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    tokens = sum(len(t) for t in TEXTS.values())
    assert engine.stats.document_tokens == tokens
    native = tokens * (engine._runner.architecture.bytes_per_token + 8 + 4)
    assert (engine.stats.store_bytes == native) == (kv_dtype == "native")
    assert engine.stats.store_bytes <= native


@pytest.mark.parametrize("layout", [Layout(), Layout(system="Be brief.", lead_in="", separator="\n#\n")])
def test_the_head_of_a_layout_is_the_canonical_context(layout):
    engine = make_engine("llama", layout=layout)
    report = engine.generate("Why?", documents=["rain", "music"], max_tokens=1).report
    assert report.spans[0].kind is SpanKind.EXACT
    assert report.spans[0].document_id is None
    assert report.spans[1].kind is SpanKind.EXACT
    assert report.spans[1].document_id == "rain"
