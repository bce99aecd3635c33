"""Tenants: an engine for each namespace over one model, and nothing that one could learn of another's documents."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from test_engine import DOCUMENTS, GREEDY, MUSIC, RAIN, ZEBRA, count_forwards, make_engine

from kvboost_rag import Document, SpanKind
from kvboost_rag.inspection import inspect_folder

ALL = ["rain", "zebra", "music"]


def kinds(report) -> set[SpanKind]:
    return {s.kind for s in report.spans if s.document_id}


@pytest.fixture
def tenants(tmp_path):
    """Two engines over one model and one folder."""
    with make_engine(namespace="a", cache_dir=tmp_path) as a, make_engine(namespace="b", cache_dir=tmp_path) as b:
        yield a, b


def test_a_document_of_another_tenant_is_neither_known_nor_found_nor_reused(tenants, monkeypatch):
    a, b = tenants
    a.add_documents(DOCUMENTS)
    a.flush()
    a.generate("Why?", documents=ALL, **GREEDY)
    assert b.documents == [] and b.get_document("zebra") is None and b.locate(f"Read {ZEBRA}.") == []
    with pytest.raises(ValueError, match="'zebra' is not known"):
        b.generate("Why?", documents=["zebra"], **GREEDY)
    # What reuse there is, is the head's and b's own last prompt's: exactly as for texts that nobody ever added.
    strangers = [Document(d.id, d.text[::-1]) for d in DOCUMENTS]
    control, asked = (b.generate("Why?", documents=given, **GREEDY).report for given in (strangers, DOCUMENTS))
    assert kinds(asked) == {SpanKind.COMPUTED}
    assert asked.tokens(SpanKind.EXACT) == control.tokens(SpanKind.EXACT)
    keys = [r.chunks for r in a._registry]
    assert not any(c.key.prefix in b._store or b._store.find(c.key.content, c.token_ids) for cs in keys for c in cs)


def test_adding_what_another_tenant_has_costs_the_same_forwards(tenants, monkeypatch):
    """Otherwise the time that it takes would tell who has a document."""
    a, b = tenants
    first, second = count_forwards(monkeypatch, a), count_forwards(monkeypatch, b)
    a.add_documents(DOCUMENTS)
    a.flush()
    b.add_documents(DOCUMENTS)
    assert first
    assert second == first


def test_an_identical_prompt_of_another_tenant_is_computed(tenants):
    a, b = tenants
    for engine in (a, b):
        prompts = ("Tell me of the sea and of the rivers.", [{"role": "user", "content": "Hello there, who are you?"}])
        for prompt in prompts:
            before = engine.generate(prompt, **GREEDY).report
            again = engine.generate(prompt, **GREEDY).report
            assert before.tokens(SpanKind.COMPUTED) > again.tokens(SpanKind.COMPUTED) == 1


def test_files_counters_and_removals_are_each_tenants_own(tenants, tmp_path):
    a, b = tenants
    for engine in tenants:
        engine.add_documents(DOCUMENTS)
        engine.flush()
    a.note_retrieved(["zebra"])
    a.generate("Why?", documents=["zebra"], **GREEDY)
    a.flush()
    b.flush()
    listed = {(d.identity, d.document_id): d for d in inspect_folder(tmp_path)}
    assert len(listed) == 6
    assert listed[a.context_key, "zebra"].retrieved == listed[a.context_key, "zebra"].used == 1
    assert listed[b.context_key, "zebra"].retrieved == listed[b.context_key, "zebra"].used == 0
    assert b.usage("zebra").used == 0
    before = set((tmp_path / a.context_key).iterdir())
    b.add_documents([Document("zebra", MUSIC + " Again.")])
    b.remove_documents(["zebra", "music"])
    b.flush()
    assert set((tmp_path / a.context_key).iterdir()) == before
    assert kinds(a.generate("Why?", documents=["music"], **GREEDY).report) == {SpanKind.EXACT}


def test_a_policy_that_one_tenant_calibrated_is_its_own(tenants):
    a, b = tenants
    assert a.policy_path != b.policy_path


def test_memory_of_finished_requests_is_each_engines_own(tenants):
    a, b = tenants
    expected = b.score("Why?", [7], reuse=False).logits
    a.generate("Why is the sea never full?", **GREEDY)
    a._prefixes.clear()
    assert a._runner.spare._pair is not None
    with torch.inference_mode():
        for buffer in a._runner.spare._pair:
            buffer.fill_(float("nan"))
    assert torch.allclose(b.score("Why?", [7]).logits, expected, atol=1e-3)
    mine = {t.data_ptr() for e in b._prefixes._entries for t in (e.cache.keys, e.cache.values)}
    assert not mine & {buffer.data_ptr() for buffer in a._runner.spare._pair}


def test_one_folders_budget_may_turn_a_tenants_documents_into_misses_but_never_into_others(tmp_path):
    """Room is shared: who must not even notice how much others store gets a folder of its own."""
    with make_engine(namespace="a", cache_dir=tmp_path, max_memory_bytes=0, max_disk_bytes="40KiB") as a:
        a.add_documents(DOCUMENTS)
        expected = a.score("Why?", [7], documents=ALL, reuse=False).logits
        with make_engine(namespace="b", cache_dir=tmp_path, max_disk_bytes="40KiB") as b:
            b.add_documents([Document(str(i), f"{i} {RAIN}") for i in range(20)])
            b.note_retrieved(map(str, range(20)))
            b.flush()
        assert torch.allclose(a.score("Why?", [7], documents=ALL, repair="random:1.0").logits, expected, atol=1e-3)


def test_tenants_answer_at_once_over_one_model_as_each_alone(tmp_path):
    """Adding, asking and streaming in one thread a tenant; the same documents under the same ids have other texts."""
    texts = {"a": (ZEBRA, MUSIC), "b": (MUSIC, RAIN), "c": (RAIN, ZEBRA)}
    asked = {"documents": ["one", "two"], **GREEDY}

    def work(engine, name) -> list:
        engine.add_documents([Document("one", texts[name][0]), Document("two", texts[name][1])])
        answers = []
        for round_ in range(3):
            answers.append(engine.generate(f"Why {round_}?", **asked).token_ids)
            answers.append(tuple(i for delta in engine.stream("Who?", **asked) for i in delta.token_ids))
        engine.flush()
        return answers

    def engines(folder):
        return {n: make_engine(namespace=n, cache_dir=tmp_path / folder, repair="cacheblend:0.3") for n in texts}

    alone = {name: work(engine, name) for name, engine in engines("alone").items()}
    together: dict[str, list] = {}
    shared = engines("together")
    threads = [threading.Thread(target=lambda n=n, e=e: together.update({n: work(e, n)})) for n, e in shared.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len({tuple(answers) for answers in alone.values()}) == 3
    for engine in shared.values():
        engine.close()


def test_another_tenants_engine_costs_its_head_and_its_documents_alone():
    a, b = make_engine(namespace="a"), make_engine(namespace="b")
    assert a.model is b.model
    context = b._encoder.context
    architecture = b._runner.architecture
    a_token = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * 4
    kept = {id(t): t.untyped_storage().nbytes() for e in b._prefixes._entries for t in (e.cache.keys, e.cache.values)}
    assert sum(kept.values()) == a_token * len(context.token_ids)
    assert b.stats.store_bytes == b.stats.prefix_bytes == 0
    one, other = (engine._encoder.context_kv.cache.keys.numpy() for engine in (a, b))
    assert not np.shares_memory(one, other)
