"""An engine that stores quantised KV: what it says of it, places, keeps and finds again."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.quantize import KV_DTYPES, dequantize
from kvboost_rag.types import Chunk

TEXTS = {
    "zebra": "The zebra ran over the plain. It was fast and striped, and it saw a lion.\n\nThen it ran home.",
    "music": "A fugue begins with one voice alone. Others join, one by one, each with the same theme.",
}
DOCUMENTS = [Document(i, t) for i, t in TEXTS.items()]
CHUNK = 24
GREEDY = {"max_tokens": 4, "temperature": 0.0}
OTHER_HISTORY = "encoded after another history"
OTHER_DOCUMENT = "the same tokens, encoded in another document"


def make_engine(kv_dtype: str = "int8", model=None, **options) -> KVBoostEngine:
    chunker = AdaptiveChunker(target=CHUNK, window=0)
    model = model or tiny_model("llama")
    engine = KVBoostEngine(model, tiny_tokenizer(), chunker=chunker, kv_dtype=kv_dtype, **options)
    engine.add_documents(DOCUMENTS)
    return engine


def spans_of(engine: KVBoostEngine, documents: list[str]) -> list[tuple[str, str, str]]:
    report = engine.generate("Why?", documents=documents, repair="none", **GREEDY).report
    return [(s.document_id, s.kind.value, s.reason) for s in report.spans if s.document_id]


def plan_of(engine: KVBoostEngine, documents: list[str]):
    listed = [engine._registry.get(i).document for i in documents]
    pieces = engine._composer.pieces(engine._renderer.render("Why?", listed, {}), raw=False)
    ids = np.concatenate([piece.token_ids for piece in pieces])
    return engine._planner.plan(pieces, engine._prefixes.match(ids, "none"))


def chunks_of(engine: KVBoostEngine, document_id: str) -> tuple[Chunk, ...]:
    return engine._registry.get(document_id).chunks


def stored_as(engine: KVBoostEngine, document_id: str) -> list[str]:
    return [engine._store.get(c.key.prefix, c.token_ids).kv_dtype for c in chunks_of(engine, document_id)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_the_report_names_what_it_is_stored_as(kv_dtype):
    assert spans_of(make_engine(kv_dtype), ["zebra", "music"]) == [
        ("zebra", "approximate", f"stored as {kv_dtype}"),
        ("music", "approximate", f"{OTHER_HISTORY}; stored as {kv_dtype}"),
    ]


def test_chunks_of_one_document_are_one_span_whatever_they_are_stored_as():
    """The first chunk, all sinks, is native: exact behind its head, and no seam of its own elsewhere."""
    engine = make_engine(sink_tokens=30)
    assert stored_as(engine, "zebra") == ["native", "int8", "int8", "int8"]
    assert [s.tokens for s in plan_of(engine, ["zebra"]).repairable] == [len(TEXTS["zebra"]) - CHUNK]
    assert spans_of(engine, ["zebra", "music"]) == [
        ("zebra", "exact", ""),
        ("zebra", "approximate", "stored as int8"),
        ("music", "approximate", f"{OTHER_HISTORY}; stored as int8"),
    ]


@pytest.mark.parametrize("kv_dtype", ["native", "int8"])
def test_chunks_found_in_another_document_begin_a_seam_each(kv_dtype):
    engine = make_engine(kv_dtype)
    engine.add_documents([Document("other", "x" * CHUNK + TEXTS["zebra"][CHUNK:])])
    for chunk in chunks_of(engine, "other")[1:3]:
        engine._store.delete(chunk.key)
    note = "" if kv_dtype == "native" else "; stored as int8"
    got = [(s.reason, s.tokens) for s in plan_of(engine, ["music", "other"]).repairable]
    rest = len(TEXTS["zebra"]) - 3 * CHUNK
    assert got[-4:] == [
        (OTHER_HISTORY + note, CHUNK),
        (OTHER_DOCUMENT + note, CHUNK),
        (OTHER_DOCUMENT + note, CHUNK),
        (OTHER_HISTORY + note, rest),
    ]


def test_what_no_history_changed_has_no_sensitivity():
    plan = plan_of(make_engine(), ["zebra", "music"])
    first, second = plan.repairable
    assert not plan.sensitivity[first.start : first.end].any()
    assert (plan.sensitivity[second.start : second.end] > 0).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", ["llama", "yarn", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_holds_the_dequantised_entries_at_their_places(kv_dtype, family, dtype, monkeypatch):
    # Blocks of three layers, of which there are four.
    monkeypatch.setattr("kvboost_rag.assemble._BLOCK", 3 * 2 * CHUNK * 16)
    model = deepcopy(tiny_model(family)).to(dtype)
    engine = make_engine(kv_dtype, model, **({} if kv_dtype == "native" else {"sink_tokens": 5}))
    plan = plan_of(engine, ["music", "zebra"])
    assert len(plan.placements) == 8
    cache = engine._reuse._assembler.assemble(plan, None, len(plan.token_ids))
    for p in plan.placements:
        end = p.position + p.end - p.start
        keys, values = (dequantize(x, p.start, p.end, torch.float32) for x in (p.entry.keys, p.entry.values))
        rotation, turned = engine._runner.architecture.rotation, torch.empty(keys.shape)
        rotation.rotate_into(turned, keys.float(), rotation.tables(p.position, end))
        assert torch.equal(cache.keys[:, 0, :, p.position : end], turned.to(dtype))
        assert torch.equal(cache.values[:, 0, :, p.position : end], values.to(dtype))


def test_the_error_shrinks_with_the_bits():
    """Against what a native engine places: near for int8, further for int4, each for its own half alone."""
    caches = {}
    for kv_dtype in KV_DTYPES:
        engine = make_engine(kv_dtype)
        plan = plan_of(engine, ["music", "zebra"])
        where = torch.cat([torch.arange(s.start, s.end) for s in plan.repairable[-1:]])
        cache = engine._reuse._assembler.assemble(plan, None, len(plan.token_ids))
        caches[kv_dtype] = cache.keys[:, :, :, where], cache.values[:, :, :, where]
    off = {d: [(x - y).abs().max() for x, y in zip(c, caches["native"], strict=True)] for d, c in caches.items()}
    assert 0 < off["int8"][0] < off["int4"][0] / 8
    assert 0 < off["int8"][1] < off["int4"][1] / 8
    assert off["int8/int4"] == [off["int8"][0], off["int4"][1]]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_restart_finds_quantised_kv_as_it_was(kv_dtype, tmp_path, monkeypatch):
    with make_engine(kv_dtype, cache_dir=tmp_path) as engine:
        expected = engine.generate("Why?", documents=["music", "zebra"], **GREEDY).token_ids
        nbytes = engine.stats.store_bytes
    with make_engine(kv_dtype, cache_dir=tmp_path) as engine:
        forwards = []
        monkeypatch.setattr(engine._encoder, "_encode_batch", forwards.append)
        engine.add_documents(DOCUMENTS)
        assert engine.generate("Why?", documents=["music", "zebra"], **GREEDY).token_ids == expected
        assert forwards == []
        assert engine.stats.store_bytes == nbytes


def test_no_form_is_served_as_another(tmp_path):
    forms = [{"kv_dtype": "native"}, *({"kv_dtype": d, "sink_tokens": s} for d in KV_DTYPES[1:] for s in (0, 2))]
    for number, form in enumerate(forms):
        with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), cache_dir=tmp_path, **form) as engine:
            assert len(engine._store) == 0
            engine.add_documents(DOCUMENTS)
            assert len(engine._store) == 2
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2 * (number + 1)
    for form in forms:
        with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), cache_dir=tmp_path, **form) as engine:
            assert len(engine._store) == 2
            engine.add_documents(DOCUMENTS)
            assert set(stored_as(engine, "zebra")) == {form["kv_dtype"]}


@pytest.mark.parametrize(("options", "words"), [
    ({"kv_dtype": "int2"}, "native, int8, int4"),
    ({"sink_tokens": 4}, "leave it out"),
    ({"kv_dtype": "int8", "reuse": "off"}, "^kv_dtype: no use"),
])  # fmt: skip
def test_options_that_can_not_be_meant_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), **options)
