"""Engines that share KV by a Redis server: what one ingests the others serve, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from redis_server import SlowWay, running
from test_exact_limits import ANSWER, DOCUMENTS, TEXTS
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import KVBoostEngine, RedisTier
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.model import ModelRunner
from kvboost_rag.store import chained, redis_store
from kvboost_rag.types import SpanKind

IDS = list(TEXTS)
SECRET = "0123456789abcdef"


@pytest.fixture(scope="module")
def module_server():
    with running() as server:
        yield server


@pytest.fixture
def server(module_server):
    module_server.empty()
    return module_server


def engine_over(store, documents=DOCUMENTS, **options) -> KVBoostEngine:
    tier = RedisTier(store, prefill_rate=1.0) if isinstance(store, str) else store
    engine = KVBoostEngine(
        tiny_model("llama"), tiny_tokenizer(), chunker=AdaptiveChunker(target=24), store=tier, **options
    )
    engine.add_documents(documents)
    return engine


@pytest.fixture
def encoded(monkeypatch):
    """Which calls computed KV of more tokens than the canonical head has, as documents' KV is."""
    calls = []
    encode = ModelRunner.encode

    def counted(self, token_ids, positions, slots, cache, length, columns=None):
        if int(slots[0]):
            calls.append(tuple(token_ids.shape))
        return encode(self, token_ids, positions, slots, cache, length, columns)

    monkeypatch.setattr(ModelRunner, "encode", counted)
    return calls


def test_what_one_process_ingests_another_one_serves_without_a_forward(server, encoded):
    child = subprocess.run(
        [sys.executable, "-W", "error", Path(__file__).with_name("redis_children.py"), server.url],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    theirs = json.loads(child.stdout)
    with engine_over(server.url) as engine:
        assert not encoded
        assert engine.stats.shared_hits == 0
        result = engine.generate("Why?", documents=IDS, max_tokens=8, temperature=0)
        assert list(result.token_ids) == theirs["token_ids"]
        assert result.report.reused_share == theirs["reused"] > 0.3
        assert "its KV is not in the store" not in {span.reason for span in result.report.spans}
        assert engine.stats.shared_hits > 0
        assert not encoded


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantised_kv_is_shared_bit_for_bit(server, encoded, kv_dtype):
    with engine_over(server.url, kv_dtype=kv_dtype) as first:
        expected = first.score("Why?", ANSWER, documents=IDS, repair="none")
    encoded.clear()
    with engine_over(server.url, kv_dtype=kv_dtype) as second:
        got = second.score("Why?", ANSWER, documents=IDS, repair="none")
        assert torch.equal(got.logits, expected.logits)
        assert got.report.spans == expected.report.spans
    assert not encoded
    with engine_over(server.url):
        assert encoded


@pytest.mark.parametrize("other", [{"namespace": "blue"}, {"secret": SECRET}, {"secret": "f" * 16, "namespace": "red"}])
def test_tenants_and_secrets_share_nothing(server, encoded, other):
    with engine_over(server.url, namespace="red", secret=SECRET):
        pass
    encoded.clear()
    with engine_over(server.url, namespace="red", secret=SECRET):
        assert not encoded
    with engine_over(server.url, **other) as engine:
        assert encoded
        assert engine.stats.shared_hits == 0


def test_a_read_only_engine_reads_and_writes_nothing(server, encoded):
    with engine_over(server.url, read_only=True):
        pass
    assert not server.keys()
    with engine_over(server.url):
        pass
    keys = server.keys()
    encoded.clear()
    with engine_over(server.url, read_only=True) as engine:
        assert engine.generate("Why?", documents=IDS, max_tokens=1).report.reused_share > 0.3
        engine.remove_documents(IDS)
    assert not encoded
    assert server.keys() == keys


@pytest.fixture
def way(server, monkeypatch):
    """A way to the server on which nothing is given up, however busy this machine is."""
    for name in ("_LOOK_SECONDS", "_WRITE_SECONDS"):
        monkeypatch.setattr(redis_store, name, 200.0)
    slow = SlowWay(server.port)
    yield slow
    slow.close()


def test_nobody_waits_for_a_slow_server_who_needs_nothing_from_it(server, way):
    with engine_over(f"redis://127.0.0.1:{way.port}", DOCUMENTS[:1]) as engine:
        engine.flush()
        way.hold = b"\r\nSET\r\n"
        engine.add_documents(DOCUMENTS[1:2])
        while not way.held:
            pass
        engine.add_documents(DOCUMENTS[2:])
        assert engine.generate("Why?", documents=IDS, max_tokens=1).report.reused_share > 0.3
        assert way.held, "the write was waited for"
        way.hold = b""
        engine.flush()
    with engine_over(server.url) as other:
        assert other.generate("Why?", documents=IDS, max_tokens=1).report.reused_share > 0.3
        assert other.stats.shared_hits


def test_looking_up_on_a_slow_server_holds_up_no_request(server, way):
    with engine_over(server.url):
        pass
    with engine_over(f"redis://127.0.0.1:{way.port}", ()) as engine, ThreadPoolExecutor(1) as pool:
        way.hold = b"\r\nGETRANGE\r\n"
        adding = pool.submit(engine.add_documents, DOCUMENTS[:1])
        while not way.held:
            pass
        assert engine.generate("Why?", max_tokens=1).text is not None
        assert not adding.done()
        way.hold = b""
        adding.result()
        assert engine.documents == DOCUMENTS[:1]


def test_removing_a_document_removes_it_for_all_and_others_serve_theirs(server):
    with engine_over(server.url) as first, engine_over(server.url) as second:
        first.flush()
        before = server.keys()
        second.remove_documents([IDS[0]])
        assert len(server.keys()) < len(before)
        report = first.generate("Why?", documents=IDS, max_tokens=1).report
        assert "its KV is not in the store" not in {span.reason for span in report.spans}
        second.remove_documents(IDS[1:])
        assert not server.keys()


def test_memory_then_folder_then_server(server, tmp_path, encoded, monkeypatch):
    # On a busy machine more chunks wait to be copied than may; those are read from the server again.
    monkeypatch.setattr(chained, "_MOST_COPIES", 100)
    with engine_over(server.url, cache_dir=tmp_path / "a") as engine:
        assert engine.stats.disk_bytes >= 0
    with engine_over(server.url, cache_dir=tmp_path / "b") as engine:
        encoded.clear()
        engine.generate("Why?", documents=IDS, max_tokens=1)
        hits = engine.stats.shared_hits
        assert hits > 0
        engine.generate("Why not?", documents=IDS, max_tokens=1)
        assert engine.stats.shared_hits == hits
        engine.flush()
        assert engine.stats.disk_bytes > 0
    with engine_over(server.url, cache_dir=tmp_path / "b") as engine:
        engine.generate("Why?", documents=IDS, max_tokens=1)
        assert engine.stats.shared_hits == 0
    assert not encoded


def full(engine, **options):
    return engine.score("Why?", ANSWER, documents=IDS, **options)


def test_a_server_that_is_away_at_the_start_and_lost_later_costs_no_answer(caplog):
    with running() as server:
        server.kill()
        with engine_over(server.url, max_memory_bytes=1, refill=False) as engine:
            assert "going on without the shared tier" in caplog.text
            expected = full(engine, reuse=False).logits
            assert full(engine).report.tokens(SpanKind.COMPUTED) > 50
            server.start()
            # Added again once the pause is over, what was missed goes to the server that has come back.
            while not server.keys():
                engine.add_documents(DOCUMENTS)
            engine.flush()
            served = full(engine, repair="random:1.0")
            assert served.report.reused_share > 0 or served.report.tokens(SpanKind.RECOMPUTED) > 50
            server.kill()
            lost = full(engine)
            assert lost.report.tokens(SpanKind.COMPUTED) > 50
            for got in (served, lost):
                assert (got.logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "http://host"}, "no URL of a Redis server"),
        ({"store": "redis://host", "reuse": "off"}, "^store: no use with reuse='off'"),
        ({"store": "redis://host", "trusted_only": True}, "trusted_only needs a secret for cache_dir and store"),
        ({"store": "redis://host", "max_disk_bytes": 1}, "max_disk_bytes is about cache_dir"),
        ({"read_only": True}, "about cache_dir or store"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), **options)


def test_a_trusted_engine_signs_what_it_shares(server, encoded):
    with engine_over(server.url, trusted_only=True, secret=SECRET):
        pass
    encoded.clear()
    with engine_over(server.url, trusted_only=True, secret=SECRET) as engine:
        assert engine.generate("Why?", documents=IDS, max_tokens=1).report.reused_share > 0.3
    assert not encoded


def test_a_wrong_password_makes_no_engine():
    with running("--requirepass", "right") as server:
        with pytest.raises(ValueError, match="refuses"):
            engine_over(f"redis://:wrong@127.0.0.1:{server.port}")


def test_the_prefill_rate_is_measured_when_nobody_says_it(server):
    with engine_over(RedisTier(server.url)) as engine:
        shared = engine._store._slow
        assert 1 < shared._rate < 1e9
