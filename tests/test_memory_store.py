"""The memory tier: a budget that holds, documents cut from their ends, pins and holds."""

from __future__ import annotations

import logging
import random
import threading

import pytest
from chunks import BYTES_A_TOKEN, document, prefixes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvboost_rag.store import EvictionScore, MemoryStore
from kvboost_rag.usage import Event, UsageLedger

METHODS = ("lru", "lfu", "importance")


def offered(store: MemoryStore, entries) -> list[bool]:
    return [store.put(entry) for entry in entries]


def held(store: MemoryStore, entries) -> int:
    """How many chunks from a document's beginning on are stored."""
    inside = [prefix in store for prefix in prefixes(entries)]
    return inside.index(False) if False in inside else len(inside)


def request(store: MemoryStore, entries) -> None:
    """Use a document as an engine does."""
    store.note(prefixes(entries), Event.RETRIEVED)
    store.note(prefixes(entries), Event.USED)
    with store.hold():
        for entry in entries:
            if store.get(entry.chunk.key.prefix, entry.chunk.token_ids) is None:
                store.put(entry)


def test_what_was_put_is_got_and_found_by_its_tokens_only():
    store = MemoryStore()
    (entry,) = document("a", [5])
    assert store.put(entry)
    key, ids = entry.chunk.key, entry.chunk.token_ids
    assert store.get(key.prefix, ids) is entry
    assert store.find(key.content, ids) is entry
    assert store.get(key.prefix, ids + 1) is None
    assert store.find(key.content, ids + 1) is None
    assert store.nbytes == entry.nbytes == 5 * BYTES_A_TOKEN
    store.delete(key)
    assert store.get(key.prefix, ids) is None
    assert store.find(key.content, ids) is None
    assert (store.nbytes, len(store), list(store)) == (0, 0, [])


@pytest.mark.parametrize("method", METHODS)
def test_a_document_is_cut_from_its_end(method):
    a, b = document("a", [4, 4, 4, 2]), document("b", [4, 4])
    store = MemoryStore(14 * BYTES_A_TOKEN, eviction=method)
    request(store, a)
    request(store, a)
    assert held(store, a) == 4
    for _ in range(3):
        request(store, b)
    assert held(store, b) == 2
    assert held(store, a) == len(store) - 2 == 1


def test_without_any_events_the_least_recently_touched_goes_first():
    a, b, c = (document(name, [4]) for name in "abc")
    store = MemoryStore(2 * 4 * BYTES_A_TOKEN)
    assert offered(store, [*a, *b]) == [True, True]
    assert store.get(a[0].chunk.key.prefix, a[0].chunk.token_ids)
    assert offered(store, c) == [True]
    assert [held(store, d) for d in (a, b, c)] == [1, 0, 1]


def test_a_document_larger_than_the_budget_keeps_its_beginning(caplog):
    caplog.set_level(logging.INFO)
    a = document("a", [4] * 6)
    store = MemoryStore(int(3.5 * 4 * BYTES_A_TOKEN))
    assert offered(store, a) == [True] * 3 + [False] * 3
    assert "pinned, in use or its own document" in caplog.text
    assert held(store, a) == 3


def test_what_stands_behind_a_refused_chunk_is_refused():
    a = document("a", [4, 4, 1])
    store = MemoryStore(int(1.5 * 4 * BYTES_A_TOKEN))
    assert offered(store, a) == [True, False, False]
    assert store.put(a[0])
    unlimited = MemoryStore()
    assert unlimited.put(a[2])


def test_what_stands_behind_an_evicted_chunk_is_refused_until_that_is_back():
    a, b = document("a", [4, 4, 4]), document("b", [4])
    store = MemoryStore(3 * 4 * BYTES_A_TOKEN)
    offered(store, a[:2])
    offered(store, b)
    for _ in range(2):
        store.note(prefixes(b), Event.USED)
    offered(store, document("c", [4]))
    assert (held(store, a), held(store, b)) == (1, 1)
    assert store.evictions == 1
    store.note(prefixes(a), Event.USED)
    assert not store.put(a[2])
    assert offered(store, a[1:]) == [True, False]


def test_a_chunk_larger_than_the_budget_is_refused_and_logged(caplog):
    store = MemoryStore(4 * BYTES_A_TOKEN)
    (small,), (large,) = document("a", [4]), document("b", [5])
    assert store.put(small)
    assert not store.put(large)
    assert f"exceeds the budget of {4 * BYTES_A_TOKEN}" in caplog.text
    assert held(store, [small]) == 1


def test_two_documents_that_begin_alike_keep_what_they_share_as_long_as_either_needs_it():
    a, b, other = document("xa", [4, 4]), document("xb", [4, 4]), document("o", [4])
    assert prefixes(a)[0] == prefixes(b)[0]
    store = MemoryStore(3 * 4 * BYTES_A_TOKEN)
    offered(store, [*a, *b])
    assert len(store) == 3
    store.note(prefixes(other), Event.USED)
    store.note(prefixes(b), Event.USED)
    store.note(prefixes(other), Event.USED)
    assert store.put(other[0])
    assert (held(store, a), held(store, b)) == (1, 2)
    # Its other owner, gone and offered again on its own, must not count as cut for ever.
    store.delete(b[0].chunk.key)
    assert offered(store, b)[0]


def test_a_newcomer_worth_less_than_what_it_would_push_out_is_refused(caplog):
    caplog.set_level(logging.DEBUG)
    popular, rare = document("p", [4, 4]), document("r", [4])
    store = MemoryStore(8 * BYTES_A_TOKEN)
    for _ in range(5):
        request(store, popular)
    request(store, rare)
    assert (held(store, popular), held(store, rare)) == (2, 0)
    assert "is worth more" in caplog.text


def test_a_refusal_evicts_nothing():
    cheap, dear, large = document("c", [1]), document("d", [4]), document("l", [5])
    store = MemoryStore(5 * BYTES_A_TOKEN)
    request(store, cheap)
    for _ in range(4):
        request(store, dear)
    store.note(prefixes(large), Event.USED)
    store.note(prefixes(large), Event.USED)
    assert not store.put(large[0])
    assert (held(store, cheap), held(store, dear)) == (1, 1)
    assert store.evictions == 0


def test_a_scan_of_many_documents_does_not_wash_out_the_popular_ones():
    popular = [document(chr(100 + i), [4]) for i in range(5)]
    store = MemoryStore(5 * 4 * BYTES_A_TOKEN)
    for _ in range(3):
        for entries in popular:
            request(store, entries)
    for i in range(500):
        request(store, document(chr(1000 + i), [4]))
    assert [held(store, entries) for entries in popular] == [1] * 5


@pytest.mark.parametrize("method", ["lru", "importance"])
def test_a_full_cache_of_old_entries_takes_a_newly_popular_document(method):
    ledger = UsageLedger(half_life=50)
    store = MemoryStore(20 * BYTES_A_TOKEN, eviction=method, usage=ledger)
    old, fresh = [document(chr(100 + i), [4]) for i in range(5)], document("n", [4])
    for _ in range(100):
        for entries in old:
            request(store, entries)
    needed = next(n for n in range(1, 1000) if request(store, fresh) or held(store, fresh))
    # Each old one counts about 100 half-lives' worth of events: some hundred requests, not all of the past.
    assert needed < 100
    assert sum(held(store, entries) for entries in old) == 4


def test_pinned_chunks_stay_and_with_them_what_stands_before(caplog):
    caplog.set_level(logging.INFO)
    a, b = document("a", [4, 4, 4]), document("b", [4, 4, 4])
    store = MemoryStore(3 * 4 * BYTES_A_TOKEN)
    store.pin(prefixes(a)[:2])
    store.pin(prefixes(a)[:2])
    offered(store, a)
    for _ in range(9):
        request(store, b)
    assert (held(store, a), held(store, b)) == (2, 1)
    store.unpin(prefixes(a)[:2])
    request(store, b)
    assert (held(store, a), held(store, b)) == (2, 1)
    assert "pinned" in caplog.text
    store.unpin(prefixes(a)[:2])
    request(store, b)
    assert (held(store, a), held(store, b)) == (0, 3)


def test_a_pinned_chunk_comes_in_whatever_it_is_worth():
    popular, pinned = document("p", [4]), document("x", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    for _ in range(5):
        request(store, popular)
    assert not store.put(pinned[0])
    store.pin(prefixes(pinned))
    assert store.put(pinned[0])
    assert held(store, popular) == 0


def test_unpinning_what_is_not_pinned_is_an_error_and_unpins_nothing():
    a, b = document("a", [4]), document("b", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    store.pin(prefixes(a))
    with pytest.raises(ValueError, match="not pinned"):
        store.unpin([*prefixes(a), *prefixes(b)])
    store.unpin(prefixes(a))


def test_what_a_hold_was_given_stays_until_it_closes():
    a, b = document("a", [4]), document("b", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    store.put(a[0])
    for _ in range(3):
        store.note(prefixes(b), Event.USED)
    with store.hold():
        assert store.find(a[0].chunk.key.content, a[0].chunk.token_ids)
        assert not store.put(b[0])
    assert store.put(b[0])


def test_a_hold_keeps_what_was_put_under_it():
    a, b = document("a", [4]), document("b", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    store.note(prefixes(b), Event.USED)
    with store.hold():
        store.put(a[0])
        assert not store.put(b[0])
    assert store.put(b[0])


def test_overlapping_holds_do_not_keep_everything_for_ever():
    a, b = document("a", [4]), document("b", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    store.note(prefixes(b), Event.USED)
    first, second = store.hold(), store.hold()
    first.__enter__()
    store.put(a[0])
    second.__enter__()
    assert not store.put(b[0])
    first.__exit__(None, None, None)
    assert store.put(b[0])
    second.__exit__(None, None, None)


def test_a_hold_ends_with_an_exception():
    a, b = document("a", [4]), document("b", [4])
    store = MemoryStore(4 * BYTES_A_TOKEN)
    store.put(a[0])
    with pytest.raises(KeyError), store.hold():
        store.get(a[0].chunk.key.prefix, a[0].chunk.token_ids)
        raise KeyError
    assert store.put(b[0])


def test_a_score_of_ones_own_decides():
    class Shortest(EvictionScore):
        def value(self, entry, usage):
            return -len(entry.chunk.token_ids)

    a, b, c = document("a", [3]), document("b", [5]), document("c", [4])
    store = MemoryStore(8 * BYTES_A_TOKEN, eviction=Shortest())
    offered(store, [*a, *b, *c])
    assert [held(store, d) for d in (a, b, c)] == [1, 0, 1]


@pytest.mark.parametrize("bad", [{"max_bytes": -1}, {"eviction": "magic"}])
def test_wrong_options_are_refused_with_the_remedy(bad):
    with pytest.raises(ValueError, match="give a positive number|known are lru, lfu, importance"):
        MemoryStore(**bad)


def test_close_forgets_everything():
    store = MemoryStore(100 * BYTES_A_TOKEN)
    a = document("a", [4, 4])
    offered(store, a)
    store.close()
    assert (store.nbytes, len(store), held(store, a)) == (0, 0, 0)
    assert offered(store, a) == [True, True]


def test_deleting_for_ever_does_not_grow_what_is_remembered():
    store = MemoryStore()
    for i in range(300):
        (entry,) = document(chr(1000 + i), [1])
        store.put(entry)
        store.delete(entry.chunk.key)
    assert len(store._ends._heap) < 50


class Machine(RuleBasedStateMachine):
    """Documents offered in order, in any mixture, to a store of each method."""

    lengths = {"a": [3, 3, 2], "b": [4], "xy": [2, 5], "xz": [2, 1, 1, 1], "c": [6, 1]}
    documents = [document(name, each) for name, each in lengths.items()]
    entries = {e.chunk.key.prefix: e for entries in documents for e in entries}
    which = st.sampled_from(documents)

    def __init__(self):
        super().__init__()
        self.stores = [MemoryStore(12 * BYTES_A_TOKEN + 7, eviction=method) for method in METHODS]
        self.pinned: list[list[str]] = []
        self.open: list[tuple[list, list[set[str]]]] = []
        self.deleted = False

    def given_out(self, number: int, prefix: str) -> None:
        for _, given in self.open:
            given[number].add(prefix)

    @rule(entries=which)
    def put(self, entries):
        for number, store in enumerate(self.stores):
            for entry in entries:
                before = {p for p in self.entries if p in store}
                if store.put(entry):
                    assert entry.chunk.key.prefix in store
                    self.given_out(number, entry.chunk.key.prefix)
                else:
                    assert before == set(store)

    @rule(entries=which)
    def get(self, entries):
        for number, store in enumerate(self.stores):
            for entry in entries:
                found = store.get(entry.chunk.key.prefix, entry.chunk.token_ids)
                assert (found is not None) == (entry.chunk.key.prefix in store)
                if found is not None:
                    assert found.chunk.key == entry.chunk.key
                    self.given_out(number, entry.chunk.key.prefix)

    @rule(entries=which, event=st.sampled_from(Event))
    def note(self, entries, event):
        for store in self.stores:
            store.note(prefixes(entries), event)

    @rule(entries=which)
    def pin(self, entries):
        chosen = prefixes(entries)[:2]
        self.pinned.append(chosen)
        for store in self.stores:
            store.pin(chosen)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        chosen = self.pinned.pop()
        for store in self.stores:
            store.unpin(chosen)

    @rule()
    def open_hold(self):
        holds = [store.hold() for store in self.stores]
        for hold in holds:
            hold.__enter__()
        self.open.append((holds, [set() for _ in self.stores]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close_hold(self, data):
        holds, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        for hold in holds:
            hold.__exit__(None, None, None)

    @rule(entries=which)
    def delete(self, entries):
        self.deleted = True
        for number, store in enumerate(self.stores):
            for entry in reversed(entries):
                store.delete(entry.chunk.key)
                for _, given in self.open:
                    given[number].discard(entry.chunk.key.prefix)

    @invariant()
    def the_budget_holds_and_the_bytes_are_those_of_the_entries(self):
        for store in self.stores:
            assert store.nbytes == sum(self.entries[p].nbytes for p in store) <= 12 * BYTES_A_TOKEN + 7
            assert len(store) == len(list(store))

    @invariant()
    def what_is_stored_of_a_document_is_its_beginning(self):
        if not self.deleted:
            for store in self.stores:
                for entries in self.documents:
                    inside = [p in store for p in prefixes(entries)]
                    assert inside == sorted(inside, reverse=True)

    @invariant()
    def what_a_hold_was_given_is_there(self):
        for number, store in enumerate(self.stores):
            for _, given in self.open:
                assert given[number] <= set(store)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_budget_holds_at_every_moment_with_eight_threads():
    budget = 60 * BYTES_A_TOKEN
    store = MemoryStore(budget)
    documents = [document(chr(200 + i), [4, 3, 2]) for i in range(30)]
    stop, seen, errors = threading.Event(), [], []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(200):
                entries = choose.choice(documents)
                with store.hold():
                    store.note(prefixes(entries), Event.USED)
                    for entry in entries:
                        key, ids = entry.chunk.key, entry.chunk.token_ids
                        if store.put(entry):
                            assert store.get(key.prefix, ids) is entry
                            assert store.find(key.content, ids) is entry
        except BaseException as error:
            errors.append(error)

    def watch() -> None:
        while not stop.is_set():
            seen.append(store.nbytes)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    watcher.join()
    assert not errors
    assert max(seen) <= budget
    assert store.nbytes == sum(e.nbytes for d in documents for e in d if e.chunk.key.prefix in store)
