"""The engine over its stores: budgets, restarts, counters, pins, what comes back, many threads."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from test_exact_limits import ANSWER, DOCUMENTS, TEXTS, make_engine
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, EngineClosedError, KVBoostEngine
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.cli import main
from kvboost_rag.model import ModelRunner
from kvboost_rag.types import SpanKind
from kvboost_rag.usage import Usage

IDS = list(TEXTS)


def engine_with(documents=DOCUMENTS, **options) -> KVBoostEngine:
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), chunker=AdaptiveChunker(target=24), **options)
    engine.add_documents(documents)
    return engine


def bytes_of(documents) -> int:
    with engine_with(documents) as engine:
        return engine.stats.store_bytes


@pytest.fixture
def forwards(monkeypatch):
    """Count the forwards that encode documents: the canonical head takes one for every engine."""
    count = []
    encode = ModelRunner.encode

    def counted(self, *args, **kwargs):
        count.append(1)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "encode", counted)
    return count


@pytest.mark.parametrize("kv_dtype", ["native", "int8", "int4"])
def test_a_restart_finds_everything_without_encoding(tmp_path, forwards, kv_dtype):
    with make_engine("llama", cache_dir=tmp_path, kv_dtype=kv_dtype) as first:
        expected = first.score("Why?", ANSWER, documents=IDS, repair="none")
    forwards.clear()
    with engine_with([], kv_dtype=kv_dtype):
        at_load = len(forwards)
    forwards.clear()
    with make_engine("llama", cache_dir=tmp_path, kv_dtype=kv_dtype) as second:
        assert len(forwards) == at_load
        got = second.score("Why?", ANSWER, documents=IDS, repair="none")
        assert torch.equal(got.logits, expected.logits)
        assert got.report.spans == expected.report.spans


def test_other_kv_dtypes_do_not_share_files(tmp_path):
    with make_engine("llama", cache_dir=tmp_path):
        pass
    with make_engine("llama", cache_dir=tmp_path, kv_dtype="int8") as engine:
        entry = engine._store.get(engine._library.prefixes(["rain"])[0], engine._library.chunks(["rain"])[0].token_ids)
        assert not isinstance(entry.keys, torch.Tensor)


def test_memory_stays_within_its_budget_and_answers_stay_right():
    budget = bytes_of(DOCUMENTS[:1]) + bytes_of(DOCUMENTS[1:2]) // 2
    with engine_with(max_memory_bytes=budget) as engine:
        assert 0 < engine.stats.store_bytes <= budget
        got = engine.score("Why?", ANSWER, documents=IDS, repair="random:1.0")
        assert (got.logits - engine.score("Why?", ANSWER, documents=IDS, reuse=False).logits).abs().max() < 1e-3
        assert got.report.tokens(SpanKind.COMPUTED) > 50
        assert engine.stats.store_bytes <= budget


def test_what_is_used_comes_back_and_pushes_out_what_is_not():
    # Room for one document of three, and the last one is asked for.
    budget = max(bytes_of([d]) for d in DOCUMENTS) + 100
    with engine_with(max_memory_bytes=budget) as engine:
        wanted = next(i for i in IDS if engine._library.prefixes([i])[0] not in engine._store)
        for _ in range(2):
            engine.generate("Why?", documents=[wanted], max_tokens=1)
            engine.flush()
        report = engine.generate("Why so?", documents=[wanted], max_tokens=1).report
        assert {s.kind for s in report.spans if s.document_id == wanted} == {SpanKind.EXACT}
        assert engine.stats.store_bytes <= budget


def test_without_refill_nothing_comes_back():
    budget = max(bytes_of([d]) for d in DOCUMENTS) + 100
    with engine_with(max_memory_bytes=budget, refill=False) as engine:
        wanted = next(i for i in IDS if engine._library.prefixes([i])[0] not in engine._store)
        for _ in range(2):
            engine.generate("Why?", documents=[wanted], max_tokens=1)
            engine.flush()
        assert engine._library.prefixes([wanted])[0] not in engine._store


def test_evicted_from_memory_is_still_on_disk(tmp_path, forwards):
    budget = bytes_of(DOCUMENTS[:1])
    with engine_with(max_memory_bytes=budget, cache_dir=tmp_path) as engine:
        engine.flush()
        forwards.clear()
        report = engine.generate("Why?", documents=IDS, max_tokens=1).report
        assert "its KV is not in the store" not in {s.reason for s in report.spans}
        engine.prefetch(IDS)
        engine.flush()
        assert not forwards
        assert engine.stats.store_bytes <= budget < engine.stats.disk_bytes


def test_a_disk_budget_holds_and_what_went_is_gone(tmp_path):
    with engine_with(cache_dir=tmp_path / "all") as engine:
        engine.flush()
        everything = engine.stats.disk_bytes
    with engine_with(cache_dir=tmp_path / "some", max_disk_bytes=everything // 2, refill=False) as engine:
        engine.flush()
        assert 0 < engine.stats.disk_bytes <= everything // 2
    files = [f for f in (tmp_path / "some").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= everything // 2


def test_three_counters_are_kept_apart_and_outlive_the_process(tmp_path):
    with engine_with(cache_dir=tmp_path) as engine:
        engine.note_retrieved(["rain", "music"])
        engine.note_retrieved(["rain"])
        engine.generate("Why?", documents=["rain"], max_tokens=1)
        assert engine.usage("rain") == Usage(retrieved=2, used=1, served=1)
        assert engine.usage("music") == Usage(retrieved=1)
        assert engine.usage("zebra") == Usage()
    with engine_with(cache_dir=tmp_path) as engine:
        assert engine.usage("rain") == Usage(retrieved=2, used=1, served=1)


def test_unknown_ids_are_named():
    with engine_with() as engine:
        for call in (engine.note_retrieved, engine.prefetch, engine.pin_documents):
            with pytest.raises(ValueError, match="'nobody'"):
                call(["nobody"])
        with pytest.raises(ValueError, match="'nobody'"):
            engine.usage("nobody")


def test_pinned_documents_stay_and_their_pin_follows_the_text():
    budget = max(bytes_of([d]) for d in DOCUMENTS) + 100
    with engine_with(DOCUMENTS[:1], max_memory_bytes=budget) as engine:
        first = DOCUMENTS[0].id
        engine.pin_documents([first])
        engine.add_documents(DOCUMENTS[1:])
        for _ in range(3):
            engine.generate("Why?", documents=IDS[1:], max_tokens=1)
            engine.flush()
        assert all(p in engine._store for p in engine._library.prefixes([first]))
        engine.add_documents([Document(first, "Another text, of a few words only.")])
        engine.generate("Why?", documents=IDS[1:], max_tokens=1)
        engine.flush()
        assert all(p in engine._store for p in engine._library.prefixes([first]))
        engine.unpin_documents([first])
        engine.remove_documents([first])
        assert not engine._store._pins


def test_a_read_only_folder_is_left_as_it_is(tmp_path):
    with engine_with(cache_dir=tmp_path):
        pass

    def listing():
        return {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in tmp_path.rglob("*") if f.is_file()}

    before = listing()
    with engine_with(cache_dir=tmp_path, read_only=True) as engine:
        engine.add_documents([Document("new", "A text that is not in the folder.")])
        engine.generate("Why?", documents=[*IDS, "new"], max_tokens=1)
        engine.remove_documents(["rain"])
    assert listing() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_memory_bytes": "4 apples"}, "4 apples"),
        ({"max_disk_bytes": "1GiB"}, "cache_dir"),
        ({"read_only": True}, "cache_dir"),
        ({"eviction": "magic"}, "unknown eviction"),
        ({"kv_dtype": "int3"}, "int3"),
    ],
)
def test_options_that_can_not_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), **options)


def test_eight_threads_adding_and_asking_give_the_serial_answers(tmp_path):
    extra = [Document(f"extra-{i}", f"Text number {i} tells of {i} ships. " * 3) for i in range(8)]
    budget = bytes_of([*DOCUMENTS, *extra[:4]])

    def ask(engine, i):
        documents = [IDS[i % 3], f"extra-{i}", IDS[(i + 1) % 3]]
        return engine.score("Why?", ANSWER, documents=documents, repair="random:1.0").logits

    with engine_with([*DOCUMENTS, *extra]) as serial:
        expected = [ask(serial, i) for i in range(8)]
    got, errors = {}, []
    with engine_with(max_memory_bytes=budget, cache_dir=tmp_path) as engine:

        def work(i):
            try:
                engine.add_documents([extra[i]])
                engine.note_retrieved([f"extra-{i}"])
                engine.prefetch([f"extra-{i}"])
                got[i] = ask(engine, i)
                engine.generate("Why?", documents=[f"extra-{i}"], max_tokens=2)
                assert engine.stats.store_bytes <= budget
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for i in range(8):
            assert (got[i] - expected[i]).abs().max() < 1e-3


def test_inspect_shows_counts_verifies_and_prunes(tmp_path, capsys):
    with engine_with(cache_dir=tmp_path) as engine:
        engine.note_retrieved(["rain"])
        engine.generate("Why?", documents=["rain"], max_tokens=1)
    assert main(["inspect", str(tmp_path), "--verify", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    rows = {row["document_id"]: row for row in out["documents"]}
    assert (rows["rain"]["retrieved"], rows["rain"]["used"], rows["rain"]["served"]) == (1, 1, 1)
    assert rows["rain"]["importance"] > rows["music"]["importance"] == 0
    assert {row["tier"] for row in rows.values()} == {"disk"}
    assert out["damaged"] == {}

    victim = next(tmp_path.rglob("*.kv.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-40] + bytes(40))
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    assert "checksum" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--prune", "--verify"]) == 0
    assert "1 files removed" in capsys.readouterr().out
    assert not victim.exists()

    assert main(["inspect", str(tmp_path), "--prune", "--max-disk-bytes", "40kB", "--json"]) == 0
    left = json.loads(capsys.readouterr().out)["documents"]
    assert sum(row["nbytes"] for row in left) <= 40_000
    assert "rain" in {row["document_id"] for row in left}
    assert main(["inspect", str(tmp_path), "--max-disk-bytes", "1kB"]) == 1
    assert "--prune" in capsys.readouterr().err


def test_closing_ends_an_ingest_in_another_thread(monkeypatch):
    documents = [Document(f"d{i}", f"Text number {i} tells of {i} ships. " * 4) for i in range(40)]
    engine, errors, begun = engine_with([]), [], threading.Event()
    encode = engine._encoder._encode_batch

    def slow(ids):
        begun.set()
        time.sleep(0.02)
        yield from encode(ids)

    monkeypatch.setattr(engine._encoder, "_encode_batch", slow)

    def add():
        try:
            engine.add_documents(documents)
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    begun.wait()
    engine.close()
    thread.join()
    assert errors
    assert len(engine._store) == 0


@pytest.mark.parametrize("budget", [0, 100])
def test_refill_gives_up_where_nothing_fits(forwards, budget):
    with engine_with(DOCUMENTS[:1], max_memory_bytes=budget, max_prefix_bytes=0) as engine:
        forwards.clear()
        for _ in range(20):
            engine.generate("Why?", documents=["zebra"], max_tokens=1)
            engine.flush()
        assert len(forwards) <= 5


def test_refill_of_documents_that_push_each_other_out_grows_rare(forwards):
    budget = max(bytes_of([d]) for d in DOCUMENTS) + 100
    with engine_with(max_memory_bytes=budget, max_prefix_bytes=0, eviction="lru") as engine:
        forwards.clear()
        for i in range(60):
            engine.generate("Why?", documents=[IDS[i % 3]], max_tokens=1)
            engine.flush()
        assert len(forwards) < 30


@pytest.mark.parametrize("pinned", [False, True])
def test_a_new_text_that_fits_is_stored_whole(pinned):
    old = Document("a", "The zebra ran over the plain and saw a lion there, far away. " * 2)
    new = Document("a", "A fugue begins with one voice alone; others join in, one by one. " * 2)
    budget = max(bytes_of([old]), bytes_of([new])) + 50
    with engine_with([old], max_memory_bytes=budget, refill=False) as engine:
        if pinned:
            engine.pin_documents(["a"])
        engine.add_documents([new])
        assert all(prefix in engine._store for prefix in engine._library.prefixes(["a"]))
        assert bool(engine._store._pins) == pinned


def test_texts_that_change_places_keep_their_kv():
    one, two = DOCUMENTS[:2]
    with engine_with([one, two]) as engine:
        engine.add_documents([Document(one.id, two.text), Document(two.id, one.text)])
        report = engine.generate("Why?", documents=[one.id, two.id], max_tokens=1).report
        assert "its KV is not in the store" not in {s.reason for s in report.spans}


def test_an_interrupted_replacement_keeps_the_pin(monkeypatch):
    with engine_with(DOCUMENTS[:1]) as engine:
        engine.pin_documents("zebra")

        def interrupted(ids):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine._encoder, "_encode_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_documents([Document("zebra", "Another text, of a few words only.")])
        assert set(engine._store._pins) == set(engine._library.prefixes("zebra"))
        assert all(prefix in engine._store for prefix in engine._library.prefixes("zebra"))


def test_an_interrupted_removal_can_be_done_again(monkeypatch):
    with engine_with() as engine:
        delete, calls = engine._store.delete, []

        def interrupted(key):
            calls.append(key)
            if len(calls) == 5:
                raise KeyboardInterrupt
            delete(key)

        monkeypatch.setattr(engine._store, "delete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.remove_documents(IDS)
        engine.remove_documents([document.id for document in engine.documents])
        assert len(engine._store) == 0


def test_documents_that_begin_alike_are_counted_apart():
    start = TEXTS["zebra"]
    documents = [Document("a", f"{start} And so it was."), Document("b", f"{start} But it never came back.")]
    with engine_with(documents) as engine:
        engine.note_retrieved(["a", "a"])
        engine.note_retrieved(["a", "b"])
        assert (engine.usage("a").retrieved, engine.usage("b").retrieved) == (2, 1)
