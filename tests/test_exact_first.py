"""Documents that are encoded behind the head alone, too, where the canonical context is longer: exact at the front."""

from __future__ import annotations

import pytest
import torch
from reference import reference_logits
from test_exact_limits import ANSWER, DOCUMENTS, TEXTS, full_logits, make_engine
from tiny import FAMILIES

from kvboost_rag import Document
from kvboost_rag.answering import Asked, Clock
from kvboost_rag.plan import BEHIND_HEAD, FIRST_NOT_STORED, OTHER_HISTORY
from kvboost_rag.repair import parse_repair
from kvboost_rag.types import SpanKind

OPTIONS = {"context_documents": ["Another text stands here."], "exact_first": True}
QUESTION = "Why did it run?"


def spans_of(engine, documents, **options) -> list[tuple[str, SpanKind, int]]:
    spans = engine.score(QUESTION, ANSWER, documents=documents, repair="none", **options).report.spans
    return [(s.document_id, s.kind, s.tokens) for s in spans if s.document_id is not None]


@pytest.fixture
def encoded(monkeypatch):
    """How many documents each forward that encodes any has."""
    from kvboost_rag.encode import Encoder

    rows, encode = [], Encoder._encode_batch

    def counted(self, ids):
        rows.append(len(ids))
        return encode(self, ids)

    monkeypatch.setattr(Encoder, "_encode_batch", counted)
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_limit_2_holds_at_the_front_after_another_context(family):
    with make_engine(family, **OPTIONS) as engine:
        alone = engine.score(QUESTION, ANSWER, documents=["zebra"], repair="none")
        assert alone.report.tokens(SpanKind.APPROXIMATE) == alone.report.tokens(SpanKind.RECOMPUTED) == 0
        assert (alone.logits - full_logits(engine, ["zebra"])).abs().max() < 1e-3
        documents = ["zebra", "music", "zebra"]
        assert spans_of(engine, documents) == [
            ("zebra", SpanKind.EXACT, len(TEXTS["zebra"])), ("music", SpanKind.APPROXIMATE, len(TEXTS["music"])),
            ("zebra", SpanKind.APPROXIMATE, len(TEXTS["zebra"])),
        ]  # fmt: skip
        got = engine.deviation(QUESTION, documents=documents, repair="none")
        deviations = torch.maximum(got.keys, got.values).amax(0)
        exact, *others = [s for s in got.spans if s.document_id is not None]
        assert deviations[: exact.end].max() < 1e-4
        assert all(deviations[s.start : s.end].max() > 1e-3 for s in others)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repair", ["none", "selective:5", "sensitive:0.2"])
def test_limit_4_all_other_documents_equal_the_slow_reference(family, repair):
    with make_engine(family, **OPTIONS) as engine:
        documents = ["zebra", "music", "zebra"]
        request = engine._compose(Asked(QUESTION, documents, {}, parse_repair(repair), True, 0), Clock())
        plan = engine._planner.plan(request.pieces, engine._prefixes.match(request.token_ids, repair))
        got = engine.score(QUESTION, ANSWER[:1], documents=documents, repair=repair)
        right, wrong = (reference_logits(engine, plan, got.report.spans, shift=shift) for shift in (0, 1))
        assert (got.logits[0] - right).abs().max() < 1e-3
        assert (got.logits[0] - wrong).abs().max() > 2e-3


def test_a_document_cut_at_the_front_is_exact_as_far_as_it_stands_there():
    with make_engine("llama", **OPTIONS) as engine:
        text = engine._renderer.head + TEXTS["zebra"][:85]
        spans = engine.score(text, ANSWER[:1], repair="none").report.spans
        assert [(s.document_id, s.kind) for s in spans][:2] == [(None, SpanKind.EXACT), ("zebra", SpanKind.EXACT)]


def test_quantised_it_is_close_and_says_so():
    with make_engine("llama", kv_dtype="int8", **OPTIONS) as engine:
        spans = engine.score(QUESTION, ANSWER, documents=["zebra", "music"], repair="none").report.spans
        assert [s.reason for s in spans if s.document_id] == ["stored as int8", f"{OTHER_HISTORY}; stored as int8"]


def test_every_document_is_encoded_twice_and_gone_when_it_is_removed(encoded):
    with make_engine("llama", **OPTIONS) as engine:
        twice, chunks = engine.stats.store_bytes, engine.stats.chunks
        assert sum(encoded) == 2 * len(DOCUMENTS)
        engine.add_documents(DOCUMENTS)
        assert sum(encoded) == 2 * len(DOCUMENTS)
        # An equal text under another id has the same KV, and keeps it.
        engine.add_documents([Document("striped", TEXTS["zebra"])])
        engine.remove_documents(["zebra"])
        assert (engine.stats.store_bytes, engine.stats.chunks) == (twice, chunks)
        assert spans_of(engine, ["striped"])[0][1] is SpanKind.EXACT
        engine.add_documents([Document("striped", "The zebra sleeps under the tree until it is evening again.")])
        engine.remove_documents(["music", "rain"])
        assert spans_of(engine, ["striped"])[0][1] is SpanKind.EXACT
        engine.remove_documents(["striped"])
        assert engine.stats.store_bytes == engine.stats.chunks == 0
    with make_engine("llama", context_documents=OPTIONS["context_documents"]) as once:
        assert 2 * once.stats.store_bytes == twice


def test_one_that_was_evicted_is_said_so_computed_and_encoded_again(encoded):
    with make_engine("llama", max_prefix_bytes=0, **OPTIONS) as engine:
        (registered,) = (r for r in engine._registry if r.document.id == "zebra")
        engine._store.delete(registered.first[-1].key)
        encoded.clear()
        spans = engine.generate(QUESTION, documents=["zebra", "music"], max_tokens=1, repair="none").report.spans
        assert [s.tokens for s in spans if s.reason == FIRST_NOT_STORED] == [16]
        engine.flush()
        assert encoded == [1]
        assert spans_of(engine, ["zebra"]) == [("zebra", SpanKind.EXACT, len(TEXTS["zebra"]))]


def test_what_stands_at_the_front_counts_as_used_and_pinned():
    with make_engine("llama", **OPTIONS) as engine:
        first = {r.document.id: [c.key.prefix for c in r.first] for r in engine._registry}
        engine.generate(QUESTION, documents=["zebra", "music"], max_tokens=1)
        assert all(engine._usage.usage(prefix).used for prefix in first["zebra"])
        assert not any(engine._usage.usage(prefix).used for prefix in first["music"])
        engine.generate("One text without any document.", max_tokens=1)
        engine.pin_documents(["rain"])
        assert set(first["rain"]) <= set(engine._memory._pins)


def test_a_folder_keeps_both_also_for_an_engine_that_uses_one(tmp_path, encoded):
    with make_engine("llama", cache_dir=tmp_path, **OPTIONS):
        assert encoded
    encoded.clear()
    with make_engine("llama", cache_dir=tmp_path, context_documents=OPTIONS["context_documents"]) as engine:
        spans = engine.score(QUESTION, ANSWER, documents=["zebra"], repair="none").report.spans
        assert BEHIND_HEAD in {s.reason for s in spans}
    with make_engine("llama", cache_dir=tmp_path, **OPTIONS) as engine:
        assert spans_of(engine, ["zebra"])[0][1] is SpanKind.EXACT
        assert not encoded
        engine.remove_documents(TEXTS)
        engine.flush()
        assert engine.stats.disk_bytes == 0


def test_it_needs_a_context_and_reuse():
    with pytest.raises(ValueError, match="exact_first is for context_documents"):
        make_engine("llama", exact_first=True)
    with pytest.raises(ValueError, match="exact_first, chunker: no use with reuse='off'"):
        make_engine("llama", reuse="off", exact_first=True, context_documents=())
