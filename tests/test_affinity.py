"""Which replica gets a request, and what that saves on made-up requests."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.affinity import choose_replica, rank_replicas
from kvboost_rag.replay import ROUTINGS, TraceOptions, make_trace, replay_routing

NAMES = [f"replica-{n}" for n in range(5)]
names = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)
documents = st.dictionaries(st.text(max_size=8), st.integers(1, 4000), max_size=6)


def homes(replicas):
    return {f"document {n}": rank_replicas({f"document {n}": 1}, replicas)[0] for n in range(2000)}


def test_documents_are_spread_over_all_replicas():
    counts = Counter(homes(NAMES).values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.25 * 2000 / len(NAMES)


def test_a_replica_that_comes_or_goes_moves_its_own_documents_alone():
    before, after = homes(NAMES[:4]), homes(NAMES)
    moved = [d for d in before if before[d] != after[d]]
    assert {after[d] for d in moved} == {NAMES[4]}
    assert 0.1 < len(moved) / len(before) < 0.3


def test_the_replica_with_most_tokens_at_home_comes_first():
    by_home = {}
    for document, home in homes(NAMES).items():
        by_home.setdefault(home, []).append(document)
    (first, a), (second, b), *_ = by_home.items()
    assert rank_replicas({a[0]: 10, b[0]: 5}, NAMES)[:2] == [first, second]
    assert rank_replicas({a[0]: 10, b[0]: 5, b[1]: 6}, NAMES)[:2] == [second, first]


@settings(max_examples=30, deadline=None)
@given(documents, names, st.randoms())
def test_the_order_of_arguments_does_not_count(sizes, replicas, random):
    ranked = rank_replicas(sizes, replicas)
    assert sorted(ranked) == sorted(replicas)
    shuffled = random.sample(replicas, len(replicas))
    assert rank_replicas(dict(reversed(sizes.items())), shuffled) == ranked


def test_every_process_and_release_comes_to_the_same_choice():
    assert rank_replicas({"a": 2, "b": 1}, NAMES) == [f"replica-{n}" for n in (4, 0, 1, 3, 2)]


@settings(max_examples=30, deadline=None)
@given(documents, st.dictionaries(st.text(max_size=8), st.integers(0, 50), min_size=1, max_size=8), st.floats(1, 3))
def test_none_gets_much_more_than_the_mean(sizes, loads, spare):
    chosen = choose_replica(sizes, loads, spare)
    limit = math.ceil(spare * (sum(loads.values()) + 1) / len(loads))
    assert loads[chosen] + 1 <= limit
    better = rank_replicas(sizes, list(loads))
    assert all(loads[name] >= limit for name in better[: better.index(chosen)])


def test_a_busy_home_is_passed_over_and_never_without_spill():
    order = rank_replicas({"a": 1}, NAMES)
    loads = dict.fromkeys(NAMES, 0) | {order[0]: 9}
    assert choose_replica({"a": 1}, loads) == order[1]
    assert choose_replica({"a": 1}, loads, math.inf) == order[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank_replicas({"a": 1}, []), "one or more"),
        (lambda: rank_replicas({"a": 1}, ["x", "x"]), "name of its own"),
        (lambda: choose_replica({"a": 1}, {}), "one or more"),
        (lambda: choose_replica({"a": 1}, {"x": 0}, 0.5), "spare is 0.5"),
        (lambda: choose_replica({"a": 1}, {"x": 0}, math.nan), "spare is nan"),
    ],
)
def test_what_makes_no_choice_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_affinity_hits_more_than_chance_and_spill_keeps_the_load_even():
    trace = make_trace(TraceOptions(requests=600, documents=200, longest=1200, retrieved=1, used=1))
    routed = {name: replay_routing(trace, name, budget_share=0.1) for name in ROUTINGS}
    assert routed["affinity"].hit_rate > 1.1 * max(routed["random"].hit_rate, routed["least busy"].hit_rate)
    assert routed["affinity, no spill"].hit_rate > 1.1 * routed["affinity"].hit_rate
    assert routed["affinity"].slow < routed["affinity, no spill"].slow
    assert routed["affinity"].slow < routed["random"].slow
    assert routed["affinity"].busiest < routed["affinity, no spill"].busiest
    with pytest.raises(ValueError, match="choose one of 'random'"):
        replay_routing(trace, "guess")
