"""Chunks in a folder: what other stores over the same folder see, what goes first, what is counted."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same

from kvboost_rag.quantize import KV_DTYPES, KVFormat
from kvboost_rag.store import DiskStore, folder_writer, read_headers, stale_files, verify_files
from kvboost_rag.store.folder_lock import FolderLock
from kvboost_rag.store.layout import folder_bytes
from kvboost_rag.usage import Event, UsageLedger

OTHER = "f" * 32
DAY = 86400.0


def open_store(folder, identity=IDENTITY, **options) -> DiskStore:
    return DiskStore(folder, identity, SHAPE, DTYPE, **options)


def file_of(folder, entry, identity=IDENTITY):
    return folder / identity / f"{entry.chunk.key.prefix}.kv.safetensors"


def use_at(folder, entry, seconds_ago, identity=IDENTITY):
    when = time.time() - seconds_ago
    os.utime(file_of(folder, entry, identity), (when, when))


def document(seed, chunks, **options):
    return [make_chunk(100 * seed + i, document_id=f"d{seed}", index=i, **options) for i in range(chunks)]


def put_all(store, entries):
    assert all([store.put(entry) for entry in entries])


def stored(store, entries):
    return [entry.chunk.index for entry in entries if entry.chunk.key.prefix in store]


@pytest.fixture
def size(tmp_path_factory):
    """Bytes of a file with 16 tokens; all are within a few bytes of it."""
    store = open_store(tmp_path_factory.mktemp("size"))
    put_all(store, [make_chunk(0)])
    return store.nbytes


def test_a_restart_finds_everything_as_it_was(tmp_path):
    entries = document(1, 3) + document(2, 2, tokens=7)
    put_all(open_store(tmp_path), entries)
    store = open_store(tmp_path)
    assert set(store) == {entry.chunk.key.prefix for entry in entries}
    assert len(store) == 5
    assert store.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    for entry in entries:
        assert same(get(store, entry), entry)
        assert same(store.find(entry.chunk.key.content, entry.chunk.token_ids), entry)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX'")
def test_a_new_folder_is_its_owners_and_one_that_is_there_keeps_its_permissions(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    for folder, mode in ((tmp_path / "above" / "new", 0o700), (shared, 0o775)):
        assert open_store(folder).put(make_chunk(1))
        assert stat.S_IMODE(folder.stat().st_mode) == mode


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_kv_comes_back_bit_for_bit(tmp_path, kv_dtype, dtype):
    native = make_chunk(1, tokens=40)
    entry = replace(native, keys=native.keys.to(dtype), values=native.values.to(dtype))
    entry = KVFormat(kv_dtype, None if kv_dtype == "native" else 4).stored(entry)
    assert DiskStore(tmp_path, IDENTITY, SHAPE, dtype).put(entry)
    found = get(DiskStore(tmp_path, IDENTITY, SHAPE, dtype), entry)
    assert same(found, entry)
    assert found.kv_dtype == kv_dtype


def test_what_is_not_there_or_holds_other_tokens_is_a_miss(tmp_path, caplog):
    store, entry = open_store(tmp_path), make_chunk(1)
    assert get(store, entry) is None
    assert store.find(entry.chunk.key.content, entry.chunk.token_ids) is None
    assert "../evil" not in store
    assert store.get("../evil", entry.chunk.token_ids) is None
    assert not caplog.records
    store.put(entry)
    assert store.get(entry.chunk.key.prefix, entry.chunk.token_ids[::-1]) is None
    assert "other tokens" in caplog.text


def test_a_stored_chunk_is_not_written_again(tmp_path):
    entry = make_chunk(1)
    put_all(open_store(tmp_path), [entry])
    before = file_of(tmp_path, entry).stat()
    put_all(open_store(tmp_path), [entry])
    assert file_of(tmp_path, entry).stat() == before


def test_what_another_store_adds_and_removes_is_seen(tmp_path, caplog):
    mine, other = open_store(tmp_path), open_store(tmp_path)
    first, second, third = document(1, 3)
    put_all(other, [first, second])
    assert first.chunk.key.prefix in mine
    assert same(get(mine, first), first)
    assert same(mine.find(second.chunk.key.content, second.chunk.token_ids), second)
    put_all(other, [third])
    assert same(mine.find(third.chunk.key.content, third.chunk.token_ids), third)
    other.delete(first.chunk.key)
    assert get(mine, first) is None
    assert first.chunk.key.prefix not in mine
    other.delete(second.chunk.key)
    assert second.chunk.key.prefix not in mine
    put_all(mine, [first])
    assert same(get(other, first), first)
    assert not caplog.records


def test_identities_share_a_folder_and_nothing_else(tmp_path):
    entry = make_chunk(1)
    mine, other = open_store(tmp_path), open_store(tmp_path, OTHER)
    put_all(mine, [entry])
    assert get(other, entry) is None
    assert other.find(entry.chunk.key.content, entry.chunk.token_ids) is None
    put_all(other, [entry])
    mine.delete(entry.chunk.key)
    assert same(get(other, entry), entry)
    assert [file.identity for file in read_headers(tmp_path)] == [OTHER]


def test_an_old_version_goes_with_the_document(tmp_path):
    old, new, other = document(1, 2), make_chunk(7, document_id="d1"), make_chunk(8)
    put_all(open_store(tmp_path), [*old, other])
    store = open_store(tmp_path)
    put_all(open_store(tmp_path), [new])
    store.drop_document("d1", {old[0].chunk.key.prefix}.__contains__)
    assert set(open_store(tmp_path)) == {old[0].chunk.key.prefix, other.chunk.key.prefix}


@pytest.mark.parametrize("writers", [1, 2])
def test_the_budget_holds_over_all_identities_and_stores(tmp_path, size, writers):
    budget = 6 * size
    stores = [open_store(tmp_path, i, max_bytes=budget) for i in (IDENTITY, OTHER) for _ in range(writers)]
    for number in range(24):
        put_all(stores[number % len(stores)], [make_chunk(number)])
        assert folder_bytes(tmp_path) <= budget
    assert 4 <= sum(1 for _ in read_headers(tmp_path)) <= 6


def test_what_can_not_fit_evicts_nothing(tmp_path, size, caplog):
    store = open_store(tmp_path, max_bytes=4 * size)
    kept = document(1, 3)
    put_all(store, kept)
    assert not store.put(make_chunk(7, tokens=16 * 6))
    assert "no room" in caplog.text
    assert stored(store, kept) == [0, 1, 2]
    assert not open_store(tmp_path / "nothing", max_bytes=0).put(make_chunk(1))


def test_a_smaller_budget_holds_from_the_opening_on(tmp_path, size, caplog):
    put_all(open_store(tmp_path), document(1, 4))
    put_all(open_store(tmp_path, OTHER), document(2, 4))
    assert len(open_store(tmp_path, max_bytes=4 * size)) + len(open_store(tmp_path, OTHER)) == 3
    assert folder_bytes(tmp_path) <= 4 * size
    assert not caplog.records
    (tmp_path / "notes.txt").write_bytes(b"x" * 5 * size)
    open_store(tmp_path, max_bytes=4 * size)
    assert "exceeds its budget" in caplog.text


def test_a_document_that_is_too_long_keeps_its_beginning(tmp_path, size):
    store, entries = open_store(tmp_path, max_bytes=4 * size), document(1, 6)
    assert [store.put(entry) for entry in entries] == [True] * 3 + [False] * 3
    assert stored(store, entries) == [0, 1, 2]


def test_the_longest_unused_goes_first_and_from_its_end(tmp_path, size):
    store = open_store(tmp_path, max_bytes=7 * size)
    first, second = document(1, 3), document(2, 3)
    put_all(store, first + second)
    for entry in first:
        use_at(tmp_path, entry, 5 * DAY)
    put_all(store, [make_chunk(7), make_chunk(8)])
    assert (stored(store, first), stored(store, second)) == ([0], [0, 1, 2])
    use_at(tmp_path, first[0], 0)
    put_all(store, [make_chunk(9)])
    assert stored(store, first) == [0]


def test_reading_is_use_and_is_written_down_once_a_minute(tmp_path):
    store, entry = open_store(tmp_path), make_chunk(1)
    put_all(store, [entry])
    use_at(tmp_path, entry, 30)
    before = file_of(tmp_path, entry).stat().st_mtime
    assert get(store, entry)
    assert file_of(tmp_path, entry).stat().st_mtime == before
    use_at(tmp_path, entry, DAY)
    assert get(store, entry)
    assert abs(file_of(tmp_path, entry).stat().st_mtime - time.time()) < DAY / 2


def test_what_is_used_often_stays_whichever_identity_it_is_of(tmp_path, size):
    ledger = UsageLedger()
    mine = open_store(tmp_path, max_bytes=5 * size, usage=ledger)
    other = open_store(tmp_path, OTHER, usage=UsageLedger())
    often, never, others = make_chunk(1), make_chunk(2), make_chunk(3)
    put_all(mine, [often, never])
    put_all(other, [others])
    mine.note([often.chunk.key.prefix], Event.USED)
    other.note([others.chunk.key.prefix], Event.USED)
    other.close()
    use_at(tmp_path, often, 9 * DAY)
    use_at(tmp_path, others, 9 * DAY, OTHER)
    put_all(mine, [make_chunk(4), make_chunk(5)])
    assert stored(mine, [often, never]) == [0]
    assert never.chunk.key.prefix not in mine
    assert others.chunk.key.prefix in other


def test_a_large_unused_document_leaves_popular_ones_alone(tmp_path, size, caplog):
    ledger = UsageLedger()
    popular = [entry for seed in range(1, 5) for entry in document(seed, 3)]
    store = open_store(tmp_path, max_bytes=13 * size, usage=ledger)
    put_all(store, popular)
    for _ in range(50):
        store.note([entry.chunk.key.prefix for entry in popular], Event.RETRIEVED)
    large = document(9, 49)
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        assert [store.put(entry) for entry in large].count(True) <= 1
    assert all(same(get(store, entry), entry) for entry in popular)
    assert "worth more" in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    store.note([large[1].chunk.key.prefix] * 51, Event.RETRIEVED)
    store.pin([large[2].chunk.key.prefix])
    put_all(store, large[1:3])


@pytest.mark.parametrize("used", [0, 50])
def test_a_new_version_takes_the_room_of_the_old_one(tmp_path, size, used):
    ledger = UsageLedger()
    store = open_store(tmp_path, max_bytes=4 * size, usage=ledger)
    old = document(1, 3)
    new = [make_chunk(900 + i, document_id="d1", index=i) for i in range(3)]
    put_all(store, old)
    store.note([entry.chunk.key.prefix for entry in old] * used, Event.RETRIEVED)
    assert [store.put(entry) for entry in new] == [True] * 3
    assert all(same(get(store, entry), entry) for entry in new)


def test_a_pinned_old_version_is_not_replaced(tmp_path, size):
    store, old = open_store(tmp_path, max_bytes=4 * size), document(1, 3)
    put_all(store, old)
    store.pin(entry.chunk.key.prefix for entry in old)
    assert not store.put(make_chunk(900, document_id="d1"))
    assert stored(store, old) == [0, 1, 2]


def test_what_is_wanted_is_told_without_writing(tmp_path, size):
    ledger, new = UsageLedger(), make_chunk(9).chunk.key.prefix
    store, entries = open_store(tmp_path, max_bytes=4 * size, usage=ledger), document(1, 3)
    assert store.wants(new)
    put_all(store, entries[:2])
    assert store.wants(new)
    put_all(store, entries[2:])
    assert not store.wants(new)
    store.note([new, *(entry.chunk.key.prefix for entry in entries)], Event.RETRIEVED)
    assert not store.wants(new)
    store.note([new], Event.RETRIEVED)
    assert store.wants(new)
    assert stored(store, entries) == [0, 1, 2]
    store.delete(entries[2].chunk.key)
    assert store.wants(make_chunk(8).chunk.key.prefix)
    assert open_store(tmp_path).wants(new)
    assert not open_store(tmp_path, read_only=True).wants(new)


def test_nothing_is_wanted_where_no_chunk_fits(tmp_path, size):
    assert not open_store(tmp_path, max_bytes=1).wants(make_chunk(1).chunk.key.prefix)
    store = open_store(tmp_path, max_bytes=size // 2)
    assert not store.put(make_chunk(1))
    assert not store.wants(make_chunk(2).chunk.key.prefix)


def test_pinned_chunks_stay(tmp_path, size):
    store = open_store(tmp_path, max_bytes=4 * size)
    pinned, other = document(1, 2), make_chunk(7)
    store.pin(entry.chunk.key.prefix for entry in pinned)
    put_all(store, [*pinned, other])
    for entry in pinned:
        use_at(tmp_path, entry, 5 * DAY)
    put_all(store, [make_chunk(8)])
    assert stored(store, [*pinned, other]) == [0, 1]
    store.unpin(entry.chunk.key.prefix for entry in pinned)
    put_all(store, [make_chunk(9)])
    assert stored(store, pinned) == [0]
    with pytest.raises(ValueError, match="not pinned"):
        store.unpin([other.chunk.key.prefix])


def test_the_usage_of_several_processes_adds_up(tmp_path):
    prefix = make_chunk(1).chunk.key.prefix
    ledgers = [UsageLedger() for _ in range(3)]
    stores = [open_store(tmp_path, usage=ledger) for ledger in ledgers]
    for store in stores:
        store.note([prefix], Event.USED)
    stores[0].flush()
    stores[0].note([prefix], Event.RETRIEVED)
    for store in stores:
        store.close()
        store.close()
    found = UsageLedger()
    open_store(tmp_path, usage=found)
    assert (found.usage(prefix).used, found.usage(prefix).retrieved) == (3, 1)


def test_usage_that_could_not_be_written_is_written_later(tmp_path, caplog):
    prefix, ledger, found = make_chunk(1).chunk.key.prefix, UsageLedger(), UsageLedger()
    store = open_store(tmp_path, usage=ledger)
    store.note([prefix], Event.USED)
    (tmp_path / IDENTITY / "usage.json").mkdir()
    store.flush()
    assert "was not written" in caplog.text
    (tmp_path / IDENTITY / "usage.json").rmdir()
    store.close()
    open_store(tmp_path, usage=found)
    assert found.usage(prefix).used == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "[" * 100_000, "\xff"])
def test_damaged_usage_is_counted_anew(tmp_path, caplog, text):
    (tmp_path / IDENTITY).mkdir()
    (tmp_path / IDENTITY / "usage.json").write_bytes(text.encode("latin-1"))
    prefix, ledger, found = make_chunk(1).chunk.key.prefix, UsageLedger(), UsageLedger()
    with closing(open_store(tmp_path, usage=ledger)) as store:
        store.note([prefix], Event.USED)
    assert "passed over" in caplog.text
    open_store(tmp_path, usage=found)
    assert found.usage(prefix).used == 1


def everything(folder):
    """What a folder holds, and when each thing was changed."""
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def test_reading_alone_changes_nothing(tmp_path, caplog):
    ledger, entries = UsageLedger(), document(1, 3)
    with closing(open_store(tmp_path, usage=ledger)) as store:
        put_all(store, entries)
        store.note([entries[0].chunk.key.prefix], Event.USED)
    use_at(tmp_path, entries[0], DAY)
    (tmp_path / IDENTITY / ".writing-x").write_bytes(b"half")
    before, found = everything(tmp_path), UsageLedger()
    store = open_store(tmp_path, read_only=True, max_bytes=1, usage=found)
    assert all(same(get(store, entry), entry) for entry in entries)
    assert found.usage(entries[0].chunk.key.prefix).used == 1
    assert not store.put(make_chunk(7))
    store.note([entries[0].chunk.key.prefix], Event.USED)
    store.delete(entries[0].chunk.key)
    assert get(store, entries[0]) is None
    assert entries[0].chunk.key.prefix not in store
    assert len(store) == 2
    store.close()
    assert everything(tmp_path) == before
    with pytest.raises(ValueError, match="readable"):
        open_store(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()
    assert not caplog.records


def test_a_reader_sees_what_a_writer_adds(tmp_path):
    writer, reader, entry = open_store(tmp_path), open_store(tmp_path, read_only=True), make_chunk(1)
    put_all(writer, [entry])
    assert same(get(reader, entry), entry)


def test_a_writer_that_never_ends_stops_nobody_for_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder_writer, "FolderLock", partial(FolderLock, wait_seconds=0.05))
    store, entry = open_store(tmp_path), make_chunk(1)
    put_all(store, [entry])
    with FolderLock(tmp_path).held("the test") as held:
        assert held
        assert not store.put(make_chunk(2))
        assert "locked for 0.05 seconds" in caplog.text
        assert same(get(store, entry), entry)
        assert same(get(open_store(tmp_path), entry), entry)
    put_all(store, [make_chunk(2)])


def test_wrong_arguments_name_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="use letters"):
        open_store(tmp_path, "../elsewhere")
    with pytest.raises(ValueError, match="positive number of bytes"):
        open_store(tmp_path, max_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="writable one, or read_only=True"):
        open_store(tmp_path / "file")


def test_a_folder_can_be_verified_and_its_stale_files_listed(tmp_path):
    good, bad = document(1, 2)
    put_all(open_store(tmp_path), [good, bad])
    put_all(open_store(tmp_path, OTHER), [good])
    assert sorted(path for path, _ in verify_files(tmp_path)) == sorted(tmp_path.rglob("*.safetensors"))
    assert not any(reason for _, reason in verify_files(tmp_path))
    with file_of(tmp_path, bad).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    assert {path: bool(reason) for path, reason in verify_files(tmp_path)} == {
        file_of(tmp_path, good): False, file_of(tmp_path, bad): True, file_of(tmp_path, good, OTHER): False,
    }  # fmt: skip
    stale = [tmp_path / ".writing-y", tmp_path / "0a.kv.safetensors"]
    for path in stale:
        shutil.copy(file_of(tmp_path, good), path)
    assert stale_files(tmp_path) == stale
    assert len(list(read_headers(tmp_path))) == 3
    assert len(open_store(tmp_path)) == 2


def test_evictions_are_logged_for_those_who_look(tmp_path, size, caplog):
    store = open_store(tmp_path, max_bytes=2 * size)
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        put_all(store, [make_chunk(1), make_chunk(2)])
    assert "evicted" in caplog.text
