"""What a killed writer, a full disk, a damaged file, another user or a wrong clock must not be able to do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from kvboost_rag.store import DiskStore, MemoryStore, TieredStore, prune_folder, read_headers, verify_files
from kvboost_rag.store.chunk_file import checksum
from kvboost_rag.store.layout import folder_bytes, temporary_files

HERE = Path(__file__).parent
OTHER = "f" * 32


class Children:
    """Processes that do what :mod:`disk_children` can do."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", HERE / "disk_children.py"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip

    def do(self, *tasks: list) -> None:
        """Run tasks at once, a process each, and wait for all; a task is its name and arguments."""
        self._process.stdin.write(json.dumps(tasks, default=str) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline() or "null")
        assert statuses == [0] * len(tasks), self._errors.read_text()

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    made = Children(tmp_path_factory.mktemp("children") / "errors")
    yield made
    made.end()


@pytest.fixture
def open_folder():
    """A folder that every user can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def open_store(folder, identity=IDENTITY, **options) -> DiskStore:
    return DiskStore(folder, identity, SHAPE, DTYPE, **options)


def file_of(folder, entry, identity=IDENTITY) -> Path:
    return folder / identity / f"{entry.chunk.key.prefix}.kv.safetensors"


def with_chunks(folder, count, **options):
    entries, store = [make_chunk(number, **options) for number in range(count)], open_store(folder)
    assert all([store.put(entry) for entry in entries])
    return entries


def assert_a_miss_that_is_logged(folder, entry, caplog):
    """Whoever had the folder open before, or opens it now, misses the chunk, says so once, and can put it again."""
    caplog.clear()
    store = open_store(folder)
    assert get(store, entry) is None
    assert store.find(entry.chunk.key.content, entry.chunk.token_ids) is None
    assert entry.chunk.key.prefix not in store
    assert get(store, entry) is None
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum(text.startswith(entry.chunk.key.prefix) for text in warnings) == 1
    assert store.put(entry)
    assert same(get(store, entry), entry)
    assert same(get(open_store(folder), entry), entry)


# Processes that die ----------------------------------------------------------------------------------------------


def test_killed_writers_leave_all_that_was_committed_and_nothing_else():
    """The same for longer: ``python tests/soak_disk.py 5000``."""
    command = [sys.executable, "-W", "error", HERE / "soak_disk.py", "110"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["kills"] >= 100
    assert told["commits"] > 0
    assert told["interrupted"] > 0


def test_what_a_killed_writer_left_goes_when_the_next_opens_whatever_the_clock_says(tmp_path):
    entry, = with_chunks(tmp_path, 1)
    left = [tmp_path / identity / ".writing-abc" for identity in (IDENTITY, OTHER)]
    for path, year in zip(left, (1, -1), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (time.time() + year * 3e7,) * 2)
    store = open_store(tmp_path)
    assert not list(temporary_files(tmp_path))
    assert same(get(store, entry), entry)


def test_nothing_is_lost_when_the_interpreter_exits_without_close(children, tmp_path):
    children.do(["leave_without_closing", tmp_path, 20])
    store = open_store(tmp_path)
    for number in range(20):
        expected = make_chunk(number, tokens=2000)
        assert same(get(store, expected), expected)


# Several processes -----------------------------------------------------------------------------------------------


def test_two_processes_may_add_the_same_document_at_once(children, tmp_path):
    children.do(*[["add", tmp_path, 0, 25, None]] * 2)
    store = open_store(tmp_path)
    assert len(store) == 25
    assert all(same(get(store, make_chunk(n)), make_chunk(n)) for n in range(25))
    assert not any(reason for _, reason in verify_files(tmp_path))


def test_the_budget_holds_while_several_processes_write_and_read(children, tmp_path):
    with_chunks(tmp_path, 1)
    size = file_of(tmp_path, make_chunk(0)).stat().st_size
    budget = 8 * size + 200
    adders = [["add", tmp_path, first, 12, budget] for first in (0, 6, 12)]
    children.do(["watch", tmp_path, budget, len(adders)], *adders)
    assert folder_bytes(tmp_path) <= budget
    assert len(open_store(tmp_path)) >= 6


# Disks that refuse -----------------------------------------------------------------------------------------------


def test_a_write_that_is_cut_short_leaves_nothing(children, tmp_path):
    children.do(["write_over_the_limit", tmp_path])
    assert not list(temporary_files(tmp_path))
    assert len(open_store(tmp_path)) == 1


def test_a_full_disk_refuses_and_goes_on(children, tmp_path):
    if sys.platform != "linux":
        pytest.skip("a small file system is made with Linux' tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system could be mounted: {mounted.stderr.strip()}")
    try:
        children.do(["fill", folder])
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("protected", [".", IDENTITY])
def test_a_folder_of_another_user_can_be_read_alone(children, open_folder, protected):
    with_chunks(open_folder, 3)
    for name, mode in ((".", 0o777), (IDENTITY, 0o777), (protected, 0o555)):
        (open_folder / name).chmod(mode)
    (open_folder / ".lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in (open_folder / IDENTITY).rglob("*")}
    children.do(["without_permission", open_folder])
    assert {path: path.stat().st_mtime_ns for path in (open_folder / IDENTITY).rglob("*")} == before


def test_a_folder_that_is_deleted_while_open_is_a_miss_and_comes_back(tmp_path):
    folder = tmp_path / "cache"
    entries = with_chunks(folder, 2)
    store = open_store(folder)
    shutil.rmtree(folder)
    assert get(store, entries[0]) is None
    assert store.find(entries[1].chunk.key.content, entries[1].chunk.token_ids) is None
    assert entries[1].chunk.key.prefix not in store
    store.delete(entries[1].chunk.key)
    store.drop_document(entries[0].chunk.document_id, lambda prefix: False)
    store.flush()
    assert store.put(entries[0])
    assert same(get(open_store(folder), entries[0]), entries[0])


def test_a_folder_that_became_a_file_is_logged_and_no_error(tmp_path, caplog):
    folder, entry = tmp_path / "cache", make_chunk(1)
    store = open_store(folder)
    shutil.rmtree(folder)
    folder.write_text("something else")
    assert get(store, entry) is None
    assert not store.put(entry)
    assert "was not written" in caplog.text
    store.delete(entry.chunk.key)
    tiered = TieredStore(MemoryStore(), store)
    assert tiered.put(entry)
    tiered.flush()
    assert same(get(tiered, entry), entry)
    tiered.close()


def test_files_from_the_future_are_used_and_evicted_like_others(tmp_path):
    entries = with_chunks(tmp_path, 3)
    size = file_of(tmp_path, entries[0]).stat().st_size
    future = time.time() + 1e8
    for entry in entries:
        os.utime(file_of(tmp_path, entry), (future, future))
    store = open_store(tmp_path, max_bytes=4 * size)
    assert same(get(store, entries[0]), entries[0])
    assert file_of(tmp_path, entries[0]).stat().st_mtime < future - 1e7
    for number in range(10, 20):
        assert store.put(make_chunk(number))
    assert not set(store) & {entry.chunk.key.prefix for entry in entries}


class NoFileMayBeOpened:
    """Takes all the handles of files that a process may have."""

    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/dev/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, self._limits[1]))
        self._handles = []
        with contextlib.suppress(OSError):
            while True:
                self._handles.append(os.open(os.devnull, os.O_RDONLY))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_what_can_not_be_opened_for_a_while_is_a_miss_and_not_damaged(tmp_path, caplog):
    first, second = with_chunks(tmp_path, 2)
    store = open_store(tmp_path, max_bytes=100_000)
    written = make_chunk(7)
    assert open_store(tmp_path).put(written)
    with NoFileMayBeOpened():
        assert store.find("0" * 32, first.chunk.token_ids) is None
        assert get(store, first) is None
    assert len(store) == 2
    assert "Too many open files" in caplog.text
    assert not list(store._index.damaged())
    assert all(same(get(store, entry), entry) for entry in (first, second))
    assert same(store.find(written.chunk.key.content, written.chunk.token_ids), written)


def test_a_new_file_that_can_not_be_read_at_first_is_found_later(tmp_path, caplog):
    store, entry = open_store(tmp_path), make_chunk(1)
    assert open_store(tmp_path).put(entry)
    path = file_of(tmp_path, entry)
    away = path.rename(tmp_path / "away")
    path.symlink_to(path.name)
    os.utime(path.parent, (1e9, 1e9))
    assert get(store, entry) is None
    assert store.find(entry.chunk.key.content, entry.chunk.token_ids) is None
    assert "symbolic links" in caplog.text
    away.replace(path)
    os.utime(path.parent, (1e9, 1e9))
    assert same(store.find(entry.chunk.key.content, entry.chunk.token_ids), entry)


def test_pruning_leaves_what_can_not_be_read(tmp_path, caplog):
    entry, damaged = with_chunks(tmp_path, 2)
    unreadable = tmp_path / IDENTITY / "loop.kv.safetensors"
    unreadable.symlink_to(unreadable.name)
    os.truncate(file_of(tmp_path, damaged), 100)
    assert "can not be read now" in dict(verify_files(tmp_path))[unreadable]
    assert prune_folder(tmp_path) == [file_of(tmp_path, damaged)]
    assert unreadable.is_symlink()
    assert "passed over" in caplog.text
    assert same(get(open_store(tmp_path), entry), entry)


@pytest.mark.parametrize("identity", [None, IDENTITY])
def test_a_folder_that_is_no_cache_is_not_pruned(tmp_path, identity):
    where = tmp_path / (identity or ".")
    where.mkdir(exist_ok=True)
    (where / ".writing-a-novel").write_text("chapter one")
    (tmp_path / "mine.kv.safetensors").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="no cache folder"):
        prune_folder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


# Files that are not what they should be --------------------------------------------------------------------------


@pytest.mark.parametrize("tenth", range(11))
def test_a_file_that_was_cut_is_a_miss(tmp_path, caplog, tenth):
    entry, other = with_chunks(tmp_path, 2)
    path, store = file_of(tmp_path, entry), open_store(tmp_path)
    size = path.stat().st_size
    for kept in {size * tenth // 10, max(size * tenth // 10 - 1, 0), min(7, tenth)} - {size}:
        os.truncate(path, kept)
        assert get(store, entry) is None
        assert same(get(store, other), other)
        assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def test_a_file_that_grew_is_a_miss(tmp_path, caplog):
    entry, = with_chunks(tmp_path, 1)
    with file_of(tmp_path, entry).open("ab") as file:
        file.write(b"\0" * 8)
    assert not list(read_headers(tmp_path))
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def test_a_file_that_shrinks_while_it_is_read_neither_kills_nor_deceives(children, tmp_path):
    """A mapped file would end the process with SIGBUS."""
    store, entry = open_store(tmp_path), make_chunk(1, tokens=2000)
    assert store.put(entry)
    children.do(["shrink", tmp_path, 100], *[["read_while_it_shrinks", tmp_path]] * 2)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    entry, = with_chunks(folder, 1)
    return open_store(folder, read_only=True), entry, file_of(folder, entry)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_are_never_served(one_file, data):
    store, entry, path = one_file
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1)))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    for content in (bytes(damaged), whole):
        # A new file each time: damaged ones are not tried again.
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").replace(path)
        found = get(store, entry)
        # White space in the header may change its kind.
        assert same(found, entry) if found or content == whole else place >= header or found is None


@pytest.mark.parametrize("place", [-1, -2000])
def test_a_flip_in_the_tensors_is_a_miss(tmp_path, caplog, place):
    entry, = with_chunks(tmp_path, 1)
    content = bytearray(file_of(tmp_path, entry).read_bytes())
    content[place] ^= 1
    file_of(tmp_path, entry).write_bytes(content)
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def test_files_that_changed_places_are_misses(tmp_path, caplog):
    first, second = with_chunks(tmp_path, 2)
    a, b = file_of(tmp_path, first), file_of(tmp_path, second)
    a.rename(tmp_path / "away")
    b.rename(a)
    (tmp_path / "away").rename(b)
    for entry in (first, second):
        assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def test_a_file_of_another_identity_under_the_same_name_is_a_miss(tmp_path, caplog):
    entry = make_chunk(1)
    assert open_store(tmp_path, OTHER).put(entry)
    open_store(tmp_path)
    shutil.copy(file_of(tmp_path, entry, OTHER), file_of(tmp_path, entry))
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def rewrite(path, meta=None, tensors=None):
    """Change a file's metadata or tensors, with a checksum that is right again."""
    with safe_open(path, framework="pt") as file:
        old_meta, old = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
    meta, tensors = {**old_meta, **(meta or {})}, {**old, **(tensors(old) if tensors else {})}
    path.write_bytes(save(tensors, metadata={**meta, "checksum": checksum(meta, tensors)}))


@pytest.mark.parametrize(
    "meta",
    [
        {"format": "kvboost_rag chunk 2"}, {"format": ""}, {"identity": OTHER}, {"prefix": "0" * 32}, {"index": "x"},
        {"tokens": "1e9"}, {"index": ""},
    ],
)  # fmt: skip
def test_a_file_that_says_it_is_something_else_is_a_miss(tmp_path, caplog, meta):
    entry, = with_chunks(tmp_path, 1)
    rewrite(file_of(tmp_path, entry))
    assert same(get(open_store(tmp_path), entry), entry)
    rewrite(file_of(tmp_path, entry), meta)
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)


@pytest.mark.parametrize("meta", [{"document_id": "another"}, {"index": "5"}, {"content": "0" * 32}, {"new": "x"}])
def test_metadata_are_under_the_checksum(tmp_path, caplog, meta):
    entry, = with_chunks(tmp_path, 1)
    path = file_of(tmp_path, entry)
    with safe_open(path, framework="pt") as file:
        old, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
    path.write_bytes(save(tensors, metadata={**old, **meta}))
    assert get(open_store(tmp_path), entry) is None
    assert "checksum" in caplog.text


@pytest.mark.parametrize(
    "tensors",
    [
        lambda old: {"keys": old["keys"][:1].contiguous()},
        lambda old: {"values": old["values"][:, :, :-1].contiguous()},
        lambda old: {"keys": old["keys"].double()},
        lambda old: {"keys": old["keys"][..., None].contiguous()},
        lambda old: {"sensitivity": old["sensitivity"][:0]},
        lambda old: {"token_ids": old["token_ids"][:-1]},
    ],
)
def test_tensors_that_do_not_fit_the_model_are_a_miss(tmp_path, caplog, tensors):
    entry, = with_chunks(tmp_path, 1)
    rewrite(file_of(tmp_path, entry), tensors=tensors)
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)


def header_of(whole: bytes) -> dict:
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])


def crafted(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def with_meta(**changes):
    def make(whole):
        header = header_of(whole)
        header["__metadata__"].update(changes)
        return crafted(header, whole[8 + int.from_bytes(whole[:8], "little") :])

    return make


def with_tensor(**changes):
    def make(whole):
        header = header_of(whole)
        header["keys"].update(changes)
        return crafted(header, whole[8 + int.from_bytes(whole[:8], "little") :])

    return make


CRAFTED = {
    "empty": lambda whole: b"",
    "zeros": lambda whole: b"\0" * 4096,
    "huge length": lambda whole: crafted(header_of(whole), whole, length=2**63),
    "longest length": lambda whole: b"\xff" * 8 + whole[8:],
    "length of the file": lambda whole: crafted(b"{}", length=10),
    "not JSON": lambda whole: crafted(b"{" * 100),
    "not UTF-8": lambda whole: crafted(b"\xff\xfe{}"),
    "nested": lambda whole: crafted(b"[" * 500_000),
    "a list": lambda whole: crafted([1, 2]),
    "a text": lambda whole: crafted("header"),
    "nothing": lambda whole: crafted({}),
    "null metadata": lambda whole: crafted({"__metadata__": None}),
    "no tensors": lambda whole: crafted({"__metadata__": header_of(whole)["__metadata__"]}),
    "tensor is no object": lambda whole: crafted({**header_of(whole), "keys": 7}),
    "numbers in metadata": with_meta(index=7),
    "infinite index": with_meta(index=float("inf")),
    "list in metadata": with_meta(document_id=["a"]),
    "another type": with_tensor(dtype="Q9"),
    "half a type": with_tensor(dtype="F16"),
    "huge shape": with_tensor(shape=[2**40, 2**40]),
    "negative shape": with_tensor(shape=[-1]),
    "negative offset": with_tensor(data_offsets=[-8, 8]),
    "offsets beyond the end": with_tensor(data_offsets=[0, 2**50]),
    "offsets that are texts": with_tensor(data_offsets=["0", "8"]),
    "one offset": with_tensor(data_offsets=[0]),
    "infinite offset": with_tensor(data_offsets=[0, float("inf")]),
    "overlapping": lambda whole: with_tensor(data_offsets=header_of(whole)["values"]["data_offsets"])(whole),
}


@pytest.mark.parametrize("make", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_file_is_a_miss(tmp_path, caplog, make):
    entry, other = with_chunks(tmp_path, 2)
    path = file_of(tmp_path, entry)
    path.write_bytes(make(path.read_bytes()))
    assert [bool(reason) for p, reason in verify_files(tmp_path) if p == path] == [True]
    assert_a_miss_that_is_logged(tmp_path, entry, caplog)
    assert same(get(open_store(tmp_path), other), other)


def test_a_folder_in_the_place_of_a_file_is_a_miss(tmp_path, caplog):
    entry, = with_chunks(tmp_path, 1)
    store = open_store(tmp_path, max_bytes=10_000)
    file_of(tmp_path, entry).unlink()
    file_of(tmp_path, entry).mkdir()
    assert get(store, entry) is None
    assert not store.put(entry)
    assert all([store.put(make_chunk(number)) for number in range(5, 10)])
    store.delete(entry.chunk.key)
    assert "could not be removed" in caplog.text
    assert entry.chunk.key.prefix not in store


def test_damaged_files_are_the_first_to_be_evicted(tmp_path):
    entries = with_chunks(tmp_path, 3)
    size = file_of(tmp_path, entries[0]).stat().st_size
    os.truncate(file_of(tmp_path, entries[1]), size - 1)
    for entry in (entries[0], entries[2]):
        os.utime(file_of(tmp_path, entry), (1e9, 1e9))
    store = open_store(tmp_path, max_bytes=3 * size + 200)
    assert store.put(make_chunk(7))
    assert not file_of(tmp_path, entries[1]).exists()
    assert all(same(get(store, entry), entry) for entry in (entries[0], entries[2]))
