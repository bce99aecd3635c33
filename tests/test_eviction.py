"""Eviction methods on made-up requests, against each other and against the best possible."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from chunks import document, prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.cli import main
from kvboost_rag.replay import (
    METHODS,
    Request,
    Trace,
    TraceOptions,
    belady,
    make_documents,
    make_trace,
    replay,
    run_replay,
)
from kvboost_rag.store import EvictionScore, MemoryStore, parse_eviction
from kvboost_rag.usage import Event, UsageLedger

SMALL = TraceOptions(requests=2_000, seed=1, documents=300, longest=900, popularity_half_life=1_000)


@pytest.fixture(scope="module")
def result():
    return run_replay(SMALL)


@pytest.mark.parametrize("name", ["stationary", "drift"])
def test_importance_saves_more_than_lru_and_lfu_and_less_than_the_bound(result, name):
    shares = result[name]
    assert max(shares["lru"], shares["lfu"]) < shares["importance"] < shares["belady"] < 1
    # Less than in the 10,000 requests of the command: there is less time to learn, and popularity changes sooner.
    assert shares["importance"] > {"stationary": 0.87, "drift": 0.73}[name] * shares["belady"]


def test_bench_eviction_prints_json(capsys):
    assert main(["bench-eviction", "--json", "--requests", "60", "--seed", "3"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out) == {"stationary", "drift", "setup"}
    for name in ("stationary", "drift"):
        assert list(out[name]) == ["lru", "lfu", "importance", "belady"]
        assert all(0 < share < 1 for share in out[name].values())
    assert (out["setup"]["requests"], out["setup"]["seed"], out["setup"]["budget_share"]) == (60, 3, 0.1)


def test_bench_eviction_prints_a_table(capsys):
    assert main(["bench-eviction", "--requests", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["lru", "lfu", "importance", "belady"]
    assert lines[-1].split()[2] == "100.0%"


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--seed", "-1"]])
def test_a_trace_that_can_not_be_made_is_one_line(arguments, capsys):
    assert main(["bench-eviction", *arguments]) == 1
    assert "give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"used": 0}, {"used": 9}, {"retrieved": 6_000}, {"shortest": 0}, {"longest": 9}])
def test_options_that_contradict_each_other_are_refused(options):
    with pytest.raises(ValueError, match="a request uses 1 or more"):
        TraceOptions(**options)


def test_traces_are_what_they_say():
    still, drifting = (make_trace(TraceOptions(seed=2, popularity_half_life=h)) for h in (None, 2_500))
    assert np.array_equal(still.tokens, drifting.tokens)
    assert 300 <= still.tokens.min() < 310 < 3_900 < still.tokens.max() <= 4_000
    for trace in (still, drifting):
        assert len(trace.requests) == 10_000
        assert all(len(set(r.retrieved)) == 8 and r.used == r.retrieved[:4] for r in trace.requests)
    assert make_trace(TraceOptions(seed=2)).requests == still.requests
    assert make_trace(TraceOptions(seed=3)).requests != still.requests
    for trace, least, most in ((still, 0.8, 1.0), (drifting, 0.0, 0.5)):
        early, late = (np.bincount([d for r in part for d in r.retrieved], minlength=5_000)
                       for part in (trace.requests[:2_500], trace.requests[-2_500:]))  # fmt: skip
        popular = np.argsort(-early)[:150]
        assert 0.5 < early[popular].sum() / early.sum() < 0.7
        assert least < late[popular].sum() / early[popular].sum() < most


def small_traces():
    tokens = st.lists(st.integers(1, 3), min_size=4, max_size=4)
    used = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple)
    requests = st.lists(used.map(lambda u: Request(u, u)), min_size=1, max_size=7).map(tuple)
    return st.builds(lambda t, r: Trace(np.array(t), r), tokens, requests)


def best_possible(trace: Trace, budget: int) -> float:
    """Try everything that can be kept, to the token."""
    best = {(0,) * len(trace.tokens): 0}
    for request in trace.requests:
        after: dict[tuple[int, ...], int] = {}
        for kept, saved in best.items():
            now = saved + sum(kept[d] for d in request.used)
            at_hand = [int(trace.tokens[d]) if d in request.used else k for d, k in enumerate(kept)]
            for chosen in itertools.product(*(range(n + 1) for n in at_hand)):
                if sum(chosen) <= budget:
                    after[chosen] = max(after.get(chosen, 0), now)
        best = after
    return max(best.values()) / sum(int(trace.tokens[d]) for r in trace.requests for d in r.used)


@settings(max_examples=40, deadline=None)
@given(small_traces(), st.integers(0, 8))
def test_the_bound_is_the_best_that_is_possible_to_the_token(trace, budget):
    assert belady(trace, budget) == pytest.approx(best_possible(trace, budget))


class Random(EvictionScore):
    """Whatever a method chooses, the bound is above it."""

    def value(self, entry, usage):
        return hash(entry.chunk.key.prefix) % 7 + usage.last(entry.chunk.key.prefix) % 3


@pytest.mark.parametrize("seed", range(3))
def test_no_method_saves_more_than_the_bound(seed):
    options = TraceOptions(requests=120, seed=seed, documents=12, shortest=100, longest=900, retrieved=3, used=2)
    trace = make_trace(options)
    documents = make_documents(trace.tokens)
    for share in (0.05, 0.3, 0.8, 1.0):
        budget = int(trace.tokens.sum() * share)
        for method in (*METHODS, Random()):
            assert replay(trace, documents, budget, method) <= belady(trace, budget) + 1e-9
    assert replay(trace, documents, budget, "lru") == pytest.approx(belady(trace, budget))


def test_methods_are_named_and_scores_pass_through():
    for method in METHODS:
        score = parse_eviction(method)
        assert parse_eviction(score) is score
    with pytest.raises(ValueError, match="unknown eviction 'fifo'; known are lru, lfu, importance"):
        parse_eviction("fifo")


def test_importance_counts_retrievals_that_were_not_used():
    (seen,), (unseen,), (newcomer,) = document("a", [4]), document("b", [4]), document("c", [4])
    store = MemoryStore(2 * seen.nbytes)
    for entry in (seen, unseen):
        store.note(prefixes([entry]), Event.USED)
        store.put(entry)
    store.note(prefixes([seen]), Event.RETRIEVED)
    store.note(prefixes([newcomer]), Event.USED)
    store.put(newcomer)
    assert prefixes([seen])[0] in store
    assert prefixes([unseen])[0] not in store


def test_importance_prefers_tokens_that_cost_fewer_bytes():
    ledger = UsageLedger()
    (small,), (large,) = document("a", [4]), document("b", [4])
    wide = type(large)(large.chunk, large.keys.double(), large.values.double(), large.sensitivity)
    ledger.note(prefixes([small, wide]), Event.USED)
    score = parse_eviction("importance")
    assert score.value(small, ledger) > score.value(wide, ledger)


def test_importance_rises_with_use_and_falls_behind_with_age():
    ledger = UsageLedger(half_life=5)
    (old,), (new,) = document("a", [4]), document("b", [4])
    score = parse_eviction("importance")
    assert score.value(old, ledger) == float("-inf")
    for _ in range(3):
        ledger.note(prefixes([old]), Event.USED)
    before = score.value(old, ledger)
    ledger.note(prefixes([new]), Event.USED)
    assert score.value(new, ledger) < score.value(old, ledger) == before
    for _ in range(20):
        ledger.note(["f" * 32], Event.USED)
    ledger.note(prefixes([new]), Event.USED)
    assert score.value(new, ledger) > score.value(old, ledger) == before
