"""Memory in front of a disk: what is written behind, moved up, and never served again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same

from kvboost_rag.store import DiskStore, MemoryStore, TieredStore
from kvboost_rag.usage import Event, UsageLedger

NBYTES = make_chunk(0).nbytes


class GatedDisk(DiskStore):
    """A disk that can be made to wait: each read and write passes a gate, and what happened is listed."""

    def __init__(self, folder, **options) -> None:
        self.writes, self.reads = threading.Event(), threading.Event()
        self.writes.set()
        self.reads.set()
        self.begun = threading.Semaphore(0)
        self.log: list[str] = []
        super().__init__(folder, IDENTITY, SHAPE, DTYPE, **options)

    def put(self, entry) -> bool:
        self.begun.release()
        assert self.writes.wait(60)
        self.log.append("put")
        return super().put(entry)

    def get(self, prefix, token_ids):
        self.begun.release()
        assert self.reads.wait(60)
        self.log.append("get")
        return super().get(prefix, token_ids)


@pytest.fixture
def disk(tmp_path):
    return GatedDisk(tmp_path)


@pytest.fixture
def stored(tmp_path):
    """Four chunks that an earlier process left."""
    entries, store = [make_chunk(i) for i in range(4)], DiskStore(tmp_path, IDENTITY, SHAPE, DTYPE)
    assert all([store.put(entry) for entry in entries])
    return entries


def key(entry) -> str:
    return entry.chunk.key.prefix


def wanted(entries):
    return [(key(entry), entry.chunk.token_ids) for entry in entries]


def in_threads(count, task):
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(task, range(count)))


def test_put_does_not_wait_for_the_disk_and_flush_does(disk):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        disk.writes.clear()
        entries = [make_chunk(i) for i in range(5)]
        assert all([store.put(entry) for entry in entries])
        assert len(disk) == 0
        assert all(get(store, entry) is entry for entry in entries)
        disk.writes.set()
        store.flush()
        assert set(disk) == set(store) == {key(entry) for entry in entries}


def test_close_writes_what_is_still_to_be_written(disk, tmp_path):
    store, entries = TieredStore(MemoryStore(), disk), [make_chunk(i) for i in range(5)]
    disk.writes.clear()
    assert all([store.put(entry) for entry in entries])
    disk.writes.set()
    store.close()
    store.close()
    store.flush()
    again = DiskStore(tmp_path, IDENTITY, SHAPE, DTYPE)
    assert all(same(get(again, entry), entry) for entry in entries)


def test_what_is_not_written_yet_stays_in_memory_and_the_rest_goes_to_disk_at_once(disk):
    with closing(TieredStore(MemoryStore(2 * NBYTES), disk)) as store:
        disk.writes.clear()
        pending = [make_chunk(0), make_chunk(1)]
        assert all([store.put(entry) for entry in pending])
        late = threading.Thread(target=store.put, args=[make_chunk(2)])
        late.start()
        late.join(0.2)
        assert late.is_alive()
        assert all(get(store, entry) is entry for entry in pending)
        assert store.nbytes == 2 * NBYTES
        disk.writes.set()
        late.join(60)
        store.flush()
        assert len(disk) == 3
        for entry in [*pending, make_chunk(2)]:
            assert same(get(store, entry), entry)
            assert store.nbytes <= 2 * NBYTES


def test_written_entries_may_be_evicted_from_memory_and_come_back_from_disk(disk):
    with closing(TieredStore(MemoryStore(2 * NBYTES, eviction="lru"), disk)) as store:
        entries = [make_chunk(i) for i in range(6)]
        for entry in entries:
            assert store.put(entry)
            store.flush()
        assert all(same(get(store, entry), entry) for entry in entries)
        assert store.nbytes == 2 * NBYTES
        disk.delete(entries[0].chunk.key)
        assert get(store, entries[0]) is None


def test_what_is_read_from_disk_moves_up(disk, stored):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        first = get(store, stored[0])
        found = store.find(stored[1].chunk.key.content, stored[1].chunk.token_ids)
        assert same(first, stored[0])
        assert same(found, stored[1])
        disk.reads.clear()
        assert get(store, stored[0]) is first
        assert get(store, stored[1]) is found
        assert store.nbytes == 2 * NBYTES


def test_what_memory_can_not_take_is_served_all_the_same(disk, stored):
    with closing(TieredStore(MemoryStore(NBYTES - 1), disk)) as store:
        assert all(same(get(store, entry), entry) for entry in stored)
        assert store.put(make_chunk(7))
        assert key(make_chunk(7)) in disk
        assert store.nbytes == 0


def test_prefetched_chunks_are_read_once_and_without_waiting(disk, stored):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        disk.reads.clear()
        store.prefetch([*wanted(stored), ("0" * 32, np.zeros(3, dtype=np.int64))])
        assert disk.begun.acquire(timeout=60)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(get, store, stored[0]) for _ in range(8)]
            disk.reads.set()
            got = [future.result() for future in asked]
        assert same(got[0], stored[0])
        assert all(entry is got[0] for entry in got)
        assert all(same(get(store, entry), entry) for entry in stored)
        store.prefetch(wanted(stored))
    # The one that is nowhere may have been asked for, or not any more when the store was closed.
    assert disk.log.count("get") - len(stored) in (0, 1)


def test_threads_that_want_one_chunk_share_it(disk, stored):
    with closing(TieredStore(MemoryStore(0), disk)) as store:
        disk.reads.clear()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(get, store, stored[0]) for _ in range(4)]
            assert disk.begun.acquire(timeout=60)
            disk.reads.set()
            got = [future.result() for future in asked]
        assert all(same(entry, stored[0]) for entry in got)
        other = store.get(key(stored[0]), stored[1].chunk.token_ids)
        assert other is None
    assert len({id(entry) for entry in got}) == disk.log.count("get") - 1


def test_a_deleted_chunk_is_not_written_behind(disk):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        disk.writes.clear()
        in_flight, waiting, other = (make_chunk(i) for i in range(3))
        for entry in (in_flight, waiting, other):
            store.put(entry)
        assert disk.begun.acquire(timeout=60)
        with ThreadPoolExecutor(2) as pool:
            deletes = [pool.submit(store.delete, entry.chunk.key) for entry in (in_flight, waiting)]
            while len(store._pending) > 1:
                threading.Event().wait(0.001)
            disk.writes.set()
            for delete in deletes:
                delete.result()
        store.flush()
        # The one in flight was written and deleted again, the waiting one was never written.
        assert disk.log == ["put", "put"]
        assert set(store) == set(disk) == {key(other)}
        assert get(store, in_flight) is None


def test_a_chunk_that_is_deleted_while_it_is_read_does_not_come_back(disk, stored):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        disk.reads.clear()
        store.prefetch(wanted(stored[:1]))
        assert disk.begun.acquire(timeout=60)
        real_delete, disk.delete = disk.delete, lambda key: None
        store.delete(stored[0].chunk.key)
        disk.reads.set()
        # One worker prefetches in order: when this is done, the prefetch is.
        store._reader.submit(int).result()
        disk.delete = real_delete
        assert disk.log == ["get"]
        assert store.nbytes == 0


def test_put_after_delete_is_written(disk):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        entry = make_chunk(0)
        for _ in range(3):
            store.put(entry)
            store.delete(entry.chunk.key)
        store.put(entry)
        store.flush()
        assert key(entry) in disk


def test_an_old_version_is_not_written_behind(disk):
    with closing(TieredStore(MemoryStore(), disk)) as store:
        disk.writes.clear()
        first, old, new = (make_chunk(i, document_id="d") for i in range(3))
        for entry in (first, old, new):
            store.put(entry)
        assert disk.begun.acquire(timeout=60)
        disk.writes.set()
        store.drop_document("d", {key(new)}.__contains__)
        store.flush()
        assert set(disk) == {key(new)}


def test_memory_goes_on_when_the_disk_fails(tmp_path, caplog, monkeypatch):
    disk = DiskStore(tmp_path, IDENTITY, SHAPE, DTYPE, max_bytes=1)
    with closing(TieredStore(MemoryStore(2 * NBYTES, eviction="lru"), disk)) as store:
        for number in range(4):
            assert store.put(make_chunk(number))
            store.flush()
        assert caplog.text.count("no room") == 4
        assert store.nbytes == 2 * NBYTES
        monkeypatch.setattr(disk, "put", lambda entry: 1 / 0)
        assert store.put(make_chunk(5))
        store.flush()
        assert "ZeroDivisionError" in caplog.text
        assert same(get(store, make_chunk(5)), make_chunk(5))
        store.unpin([])
        with pytest.raises(ValueError, match="not pinned"):
            store.unpin([key(make_chunk(5))])


def test_pins_hold_in_both_and_outlast_the_write(disk):
    with closing(TieredStore(MemoryStore(2 * NBYTES, eviction="lru"), disk)) as store:
        pinned = make_chunk(0)
        store.pin([key(pinned)])
        for number in range(5):
            store.put(make_chunk(number))
            store.flush()
        disk.reads.clear()
        assert get(store, pinned) is not None
        assert key(pinned) in disk._pins
        store.unpin([key(pinned)])
        assert not disk._pins


def test_entries_in_use_stay_in_memory(disk, stored):
    with closing(TieredStore(MemoryStore(2 * NBYTES, eviction="lru"), disk)) as store:
        with store.hold():
            held = [get(store, stored[0]), get(store, stored[1])]
            assert same(get(store, stored[2]), stored[2])
            disk.reads.clear()
            assert [get(store, entry) for entry in stored[:2]] == held
            disk.reads.set()
        assert get(store, stored[3])
        assert key(stored[3]) in store._fast


def test_events_are_counted_once(tmp_path):
    ledger, entry = UsageLedger(), make_chunk(0)
    disk = DiskStore(tmp_path, IDENTITY, SHAPE, DTYPE, usage=ledger)
    with closing(TieredStore(MemoryStore(usage=ledger), disk)) as store:
        store.note([key(entry)], Event.USED)
        assert ledger.usage(key(entry)).used == 1
    found = UsageLedger()
    DiskStore(tmp_path, IDENTITY, SHAPE, DTYPE, usage=found)
    assert found.usage(key(entry)).used == 1


@pytest.mark.parametrize("budget", [3 * NBYTES, None])
def test_eight_threads_see_only_what_was_put(tmp_path, budget):
    entries = [make_chunk(i) for i in range(12)]
    file = DiskStore(tmp_path / "size", IDENTITY, SHAPE, DTYPE)
    file.put(entries[0])
    disk = DiskStore(tmp_path / "disk", IDENTITY, SHAPE, DTYPE, max_bytes=8 * file.nbytes)
    with closing(TieredStore(MemoryStore(budget, eviction="lru"), disk)) as store:

        def work(seed):
            random = np.random.default_rng(seed)
            wrong = 0
            for number in random.integers(0, len(entries), 60):
                entry, action = entries[number], random.integers(0, 5)
                if action == 0:
                    store.put(entry)
                elif action == 1:
                    store.delete(entry.chunk.key)
                elif action == 2:
                    store.prefetch(wanted([entry]))
                else:
                    found = get(store, entry)
                    wrong += found is not None and not same(found, entry)
                wrong += budget is not None and store.nbytes > budget
            return wrong

        assert sum(in_threads(8, work)) == 0
        for entry in entries:
            store.delete(entry.chunk.key)
        store.flush()
        assert len(store) == len(disk) == 0
        assert all([store.put(entry) for entry in entries[:6]])
        store.flush()
        assert set(disk) == {key(entry) for entry in entries[:6]}
        assert not store._pending
        assert not store._loading
