"""The ledger: counts, decay by requests, a bound, and merging between processes."""

from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.usage import Event, Usage, UsageLedger

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def pass_requests(ledger: UsageLedger, count: int) -> None:
    for _ in range(count):
        ledger.note([C], Event.USED)


def through_json(data):
    return json.loads(json.dumps(data))


def test_events_are_counted_by_chunk():
    ledger = UsageLedger()
    ledger.note([A, B], Event.RETRIEVED)
    ledger.note(iter([A]), Event.USED)
    ledger.note([A], Event.SERVED)
    assert ledger.usage(A) == Usage(1, 1, 1)
    assert ledger.usage(B) == Usage(retrieved=1)
    assert ledger.usage(C) == Usage()
    assert len(ledger) == 2


def test_frequency_halves_with_every_half_life():
    ledger = UsageLedger(half_life=10)
    ledger.note([A], Event.USED)
    now = ledger.frequency(A)
    pass_requests(ledger, 10)
    assert ledger.frequency(A) == pytest.approx(now / 2)
    pass_requests(ledger, 20)
    assert ledger.frequency(A) == pytest.approx(now / 8)
    assert ledger.frequency(B) == 0


def test_retrieval_counts_and_serving_does_not():
    ledger = UsageLedger()
    ledger.note([A], Event.RETRIEVED)
    assert ledger.frequency(A) > 0
    ledger.note([B], Event.SERVED)
    assert ledger.frequency(B) == 0


def test_only_requests_make_older():
    ledger = UsageLedger(half_life=1)
    ledger.note([A], Event.USED)
    before = ledger.frequency(A)
    for event in (Event.RETRIEVED, Event.SERVED):
        ledger.note([B], event)
    assert ledger.frequency(A) == before


def test_the_clock_is_never_read(monkeypatch):
    def read(*args):
        raise AssertionError("the clock was read")

    for name in ("time", "monotonic", "time_ns", "monotonic_ns", "perf_counter"):
        monkeypatch.setattr(time, name, read)
    ledger = UsageLedger(half_life=1)
    ledger.note([A], Event.USED)
    ledger.merge_json(ledger.take_delta())
    assert ledger.frequency(A) > 0


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from(Event)), max_size=40))
def test_heat_orders_as_frequency_does_and_rests_when_nothing_happens(events):
    ledger = UsageLedger(half_life=3)
    for prefix, event in events:
        others = {p: ledger.heat(p) for p in (A, B, C) if p != prefix}
        ledger.note([prefix], event)
        assert {p: ledger.heat(p) for p in others} == others
    by_heat = sorted((A, B, C), key=lambda p: (ledger.heat(p), p))
    frequencies = [ledger.frequency(p) for p in by_heat]
    assert frequencies == pytest.approx(sorted(frequencies))


def test_last_is_the_request_that_used_it():
    ledger = UsageLedger()
    assert ledger.last(A) == 0
    ledger.note([A], Event.USED)
    first = ledger.last(A)
    pass_requests(ledger, 3)
    ledger.note([A], Event.RETRIEVED)
    assert ledger.last(A) == first
    ledger.note([A], Event.USED)
    assert ledger.last(A) == first + 4


def test_old_and_rare_chunks_are_dropped_beyond_the_bound():
    ledger = UsageLedger(max_keys=50, half_life=100)
    for _ in range(5):
        ledger.note([A], Event.USED)
    ledger.note([B], Event.USED)
    for i in range(1000):
        ledger.note([f"{i:032x}"], Event.RETRIEVED)
        assert len(ledger) <= 50
    assert ledger.usage(A).used == 5
    pass_requests(ledger, 2000)
    for i in range(1000):
        ledger.note([f"{i:032x}"], Event.RETRIEVED)
    assert ledger.usage(A) == Usage()
    assert ledger.usage(C).used == 2000


def test_all_of_it_comes_back_from_json():
    ledger, again = UsageLedger(half_life=7), UsageLedger(half_life=7)
    ledger.note([A, B], Event.RETRIEVED)
    ledger.note([A], Event.USED)
    pass_requests(ledger, 5)
    again.merge_json(through_json(ledger.to_json()))
    for prefix in (A, B, C):
        assert again.usage(prefix) == ledger.usage(prefix)
        assert again.frequency(prefix) == pytest.approx(ledger.frequency(prefix))
        assert again.last(prefix) == ledger.last(prefix)


def test_two_processes_add_up_in_one_file():
    file = UsageLedger().to_json()

    def save(ledger: UsageLedger) -> None:
        nonlocal file
        merged = UsageLedger()
        merged.merge_json(file)
        merged.merge_json(ledger.take_delta())
        file = through_json(merged.to_json())

    one, other = UsageLedger(), UsageLedger()
    one.note([A], Event.USED)
    save(one)
    other.merge_json(file)
    other.note([A, B], Event.USED)
    save(other)
    save(other)
    one.note([A], Event.SERVED)
    save(one)
    result = UsageLedger()
    result.merge_json(file)
    assert result.usage(A) == Usage(used=2, served=1)
    assert result.usage(B) == Usage(used=1)
    assert other.usage(A) == Usage(used=2)


def test_a_delta_that_could_not_be_written_is_not_lost():
    ledger = UsageLedger()
    ledger.note([A], Event.USED)
    lost = ledger.take_delta()
    ledger.note([A, B], Event.USED)
    ledger.return_delta(lost)
    delta = UsageLedger()
    delta.merge_json(ledger.take_delta())
    assert (delta.usage(A), delta.usage(B)) == (Usage(used=2), Usage(used=1))
    assert ledger.usage(A) == Usage(used=2)
    assert ledger.take_delta()["chunks"] == {}


def test_requests_of_others_make_older():
    ledger, other = UsageLedger(half_life=10), UsageLedger(half_life=10)
    ledger.note([A], Event.USED)
    before = ledger.frequency(A)
    pass_requests(other, 10)
    ledger.merge_json(other.to_json())
    assert ledger.frequency(A) == pytest.approx(before / 2)


NO_KEYS = ("", "a" * 31, "a" * 33, "A" * 32, "g" * 32, A + "\n")
GOOD = {"format": 1, "requests": 3, "chunks": {A: [1, 1, 0, 1.5, 2]}}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {**GOOD, "format": 2},
        {**GOOD, "requests": -1},
        {**GOOD, "requests": True},
        {**GOOD, "requests": 1 << 80},
        {**GOOD, "chunks": []},
        *(
            {**GOOD, "chunks": {B: [1, 0, 0, 1.0, 0], A: row}}
            for row in (
                None, [], [1, 1, 0, 1.5], [1, 1, 0, 1.5, 2, 0], [1, 1, 0, float("nan"), 2], [1, 1, 0, float("inf"), 2],
                [1, 1, 0, -1.0, 2], [1, 1.5, 0, 1.5, 2], [-1, 1, 0, 1.5, 2], [1, 1, 0, "1", 2], [1, 1, 0, 1.5, -2],
            )
        ),
        *({**GOOD, "chunks": {key: [1, 1, 0, 1.5, 2]}} for key in NO_KEYS),
    ],
)  # fmt: skip
def test_a_damaged_ledger_is_refused_and_adds_nothing(bad):
    ledger = UsageLedger()
    ledger.merge_json(GOOD)
    before = ledger.to_json()
    for add in (ledger.merge_json, ledger.return_delta):
        with pytest.raises(ValueError, match="delete it, counting begins anew"):
            add(bad)
    assert ledger.to_json() == before
    assert ledger.take_delta()["chunks"] == {}


@pytest.mark.parametrize("options", [{"half_life": 0}, {"half_life": -1.0}, {"max_keys": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="give positive numbers"):
        UsageLedger(**options)


def test_threads_lose_no_event():
    ledger = UsageLedger()
    deltas = []

    def work() -> None:
        for i in range(500):
            ledger.note([A], Event.USED)
            if i % 100 == 0:
                deltas.append(ledger.take_delta())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.usage(A).used == 4000
    total = UsageLedger()
    for delta in [*deltas, ledger.take_delta()]:
        total.merge_json(delta)
    assert total.usage(A).used == 4000
