"""What processes do to a cache folder in the fault tests.

Run as a script it reads lines of JSON, each a list of ``[task, argument...]``; it runs every task of a line in a
process of its own, all at once, and answers with their exit statuses. It imports once and forks, because importing
takes seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same

from kvboost_rag.store import DiskStore, MemoryStore, TieredStore
from kvboost_rag.store.layout import folder_bytes, temporary_files

NOBODY = 65534


def open_store(folder: str, **options) -> DiskStore:
    return DiskStore(Path(folder), IDENTITY, SHAPE, DTYPE, **options)


def add(folder: str, first: int, count: int, max_bytes: int | None) -> None:
    """Add chunks and see that each is there and the budget holds."""
    store = open_store(folder, max_bytes=max_bytes)
    try:
        for number in range(first, first + count):
            entry = make_chunk(number)
            assert store.put(entry)
            found = get(store, entry)
            assert same(found, entry) or (found is None and max_bytes is not None)
            assert max_bytes is None or folder_bytes(Path(folder)) <= max_bytes
    finally:
        Path(folder, f"done-{os.getpid()}").mkdir()


def watch(folder: str, max_bytes: int, writers: int) -> None:
    """See until all writers are done that the folder is within its budget and serves what was put."""
    store, looks = open_store(folder, read_only=True), 0
    while len(list(Path(folder).glob("done-*"))) < writers:
        assert folder_bytes(Path(folder)) <= max_bytes
        entry = make_chunk(looks % 40)
        found = get(store, entry)
        assert found is None or same(found, entry)
        looks += 1
    assert looks > 10


def leave_without_closing(folder: str, count: int) -> None:
    """End like any script, while chunks are still to be written."""
    store = TieredStore(MemoryStore(), open_store(folder))
    # What is to be written waits for the first chunk, which waits for us.
    with store._alone(make_chunk(0, tokens=2000).chunk.key.prefix):
        for number in range(count):
            assert store.put(make_chunk(number, tokens=2000))
        assert len(store._pending) == count


def write_over_the_limit(folder: str) -> None:
    """Write while files may not grow beyond 20 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    store = open_store(folder)
    big, small = make_chunk(1, tokens=1000), make_chunk(2)
    assert not store.put(big)
    assert big.chunk.key.prefix not in store
    assert not list(temporary_files(Path(folder)))
    assert store.put(small)
    assert same(get(store, small), small)


def fill(folder: str) -> None:
    """Fill a small file system, and go on when something was deleted."""
    store, put = open_store(folder), []
    for number in range(1000):
        entry = make_chunk(number, tokens=500)
        if not store.put(entry):
            break
        put.append(entry)
    assert 3 < len(put) < 1000
    assert not list(temporary_files(Path(folder)))
    for opened in (store, open_store(folder, max_bytes=1 << 30)):
        assert all(same(get(opened, entry), entry) for entry in put)
    for entry in put[:2]:
        store.delete(entry.chunk.key)
    assert store.put(put[0])
    assert set(open_store(folder)) == {entry.chunk.key.prefix for entry in (put[0], *put[2:])}


def without_permission(folder: str) -> None:
    """Use a folder that belongs to somebody else."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        open_store(folder)
    except ValueError as error:
        assert "writable" in str(error) and "read_only=True" in str(error)
    else:
        raise AssertionError("the folder could be opened for writing")
    store = open_store(folder, read_only=True)
    assert all(same(get(store, make_chunk(n)), make_chunk(n)) for n in range(3))


def read_while_it_shrinks(folder: str) -> None:
    """Read a chunk over and over while another process cuts its file and makes it whole again."""
    store, entry = open_store(folder, read_only=True), make_chunk(1, tokens=2000)
    served = missed = 0
    while not Path(folder, "done").exists():
        found = get(store, entry)
        served += found is not None
        missed += found is None
        assert found is None or same(found, entry)
    assert served and missed, (served, missed)


def shrink(folder: str, times: int) -> None:
    """Cut a file and make it whole again, in place."""
    path = next(Path(folder, IDENTITY).glob("*.safetensors"))
    whole = path.read_bytes()
    with path.open("r+b") as file:
        for number in range(times):
            file.truncate(number * 7919 % len(whole))
            time.sleep(0.001)
            file.seek(0)
            file.write(whole)
            file.flush()
            time.sleep(0.003)
    Path(folder, "done").mkdir()


TASKS: dict[str, Callable[..., None]] = {
    task.__name__: task
    for task in (
        add, watch, leave_without_closing, write_over_the_limit, fill, without_permission, shrink,
        read_while_it_shrinks,
    )
}  # fmt: skip


def main() -> None:
    """Answer requests; a child returns from here to exit as any interpreter does."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        children = []
        for task, *arguments in json.loads(line):
            child = os.fork()
            if not child:
                TASKS[task](*arguments)
                return
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
