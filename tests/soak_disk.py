"""Kill writers at random moments, and look each time at what they left: ``python tests/soak_disk.py ROUNDS``.

The process imports once and then only forks writers, so that a round costs milliseconds. It never writes a chunk
itself, and opens the folder anew after each kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from disk_chunks import DTYPE, IDENTITY, SHAPE, get, make_chunk, same

from kvboost_rag.store import DiskStore, verify_files
from kvboost_rag.store.layout import folder_bytes, temporary_files
from kvboost_rag.types import ChunkKV

WRITERS = 2
CHUNKS_EACH = 12
LONGEST_WAIT_SECONDS = 0.05
BUDGET = 600_000


@cache
def chunk(number: int) -> ChunkKV:
    """Return one of the chunks that are written: 4 kB to 300 kB."""
    return make_chunk(number, tokens=random.Random(number).randint(16, 1200))


@dataclass
class Folder:
    """A cache folder, and which chunks must be in it."""

    path: Path
    max_bytes: int | None
    certain: set[int]

    def open(self) -> DiskStore:
        """Open it as any process does."""
        return DiskStore(self.path, IDENTITY, SHAPE, DTYPE, max_bytes=self.max_bytes)


def write(folder: Folder, writer: int, seed: int, report: int) -> None:
    """Put and delete one writer's chunks without end, telling what is certain."""
    choose = random.Random(seed)
    store = folder.open()
    while True:
        number = writer * CHUNKS_EACH + choose.randrange(CHUNKS_EACH)
        if choose.random() < 0.6:
            if store.put(chunk(number)):
                os.write(report, f"+{number}\n".encode())
        else:
            os.write(report, f"-{number}\n".encode())
            store.delete(chunk(number).chunk.key)


def check(folder: Folder) -> None:
    """See that nothing that was committed is lost, nothing damaged is served and nothing half written is left."""
    store = folder.open()
    assert not list(temporary_files(folder.path)), "temporary files are left"
    for number in range(WRITERS * CHUNKS_EACH):
        entry = get(store, chunk(number))
        if entry is not None or number in folder.certain:
            assert same(entry, chunk(number)), f"chunk {number} is not what was written"
    assert not [reason for _, reason in verify_files(folder.path) if reason], "a file is damaged"
    if folder.max_bytes is not None:
        assert folder_bytes(folder.path) <= folder.max_bytes, "the budget is exceeded"


def forked(task: Callable[..., None], *arguments: object) -> int:
    """Run a task in a new process, which ends by itself only if the task raises."""
    process = os.fork()
    if not process:
        try:
            task(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return process


def reported(pipe: int) -> Iterator[tuple[bool, int]]:
    """Read what writers told: whether a chunk is certain from then on, and which."""
    with os.fdopen(pipe) as lines:
        for line in lines:
            yield line[0] == "+", int(line[1:])


def kill_once(folder: Folder, choose: random.Random) -> Counter[str]:
    """Start writers, kill them, and check what they left."""
    pipe, report = os.pipe()
    count = choose.choice([1, 1, WRITERS])
    writers = [forked(write, folder, n, choose.getrandbits(32), report) for n in range(count)]
    os.close(report)
    time.sleep(choose.uniform(0, LONGEST_WAIT_SECONDS))
    for process in writers:
        os.kill(process, signal.SIGKILL)
    killed = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL for process in writers]
    assert all(killed), "a writer ended by itself"
    told = Counter(kills=len(writers), interrupted=sum(1 for _ in temporary_files(folder.path)))
    for is_certain, number in reported(pipe):
        told["commits"] += is_certain
        (folder.certain.add if is_certain else folder.certain.discard)(number)
    if folder.max_bytes is not None:
        folder.certain.clear()
    check(folder)
    return told


def main() -> None:
    """Run the rounds and print what happened as JSON; a fault ends it with a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for number in range(WRITERS * CHUNKS_EACH):
        chunk(number)
    choose, totals = random.Random(options.seed), Counter(rounds=options.rounds)
    with tempfile.TemporaryDirectory() as root:
        folders = [Folder(Path(root) / "free", None, set()), Folder(Path(root) / "bounded", BUDGET, set())]
        for number in range(options.rounds):
            totals += kill_once(folders[number % 2], choose)
    sys.stdout.write(json.dumps(totals) + "\n")


if __name__ == "__main__":
    main()
