"""Many clients at once for a while: requests, errors, time to the first token with reuse and without, memory.

    python examples/load_test.py --seconds 600 --clients 8

Starts a server of its own on a free port of this machine, or takes one that runs: ``--url``, and ``--pid`` for its
memory. Every other request reuses nothing; some clients leave in the middle of an answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvboost_rag.demo_documents import demo_documents

QUESTIONS = ("What is this about?", "Who is named?", "When was that?", "Where was that?")
LEAVES = 0.1


@dataclass
class Counts:
    """What happened, of all clients."""

    requests: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)
    ttft: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; 1 if there was an error."""
    args = parser().parse_args(arguments)
    with server(args) as (url, pid):
        counts = Counts()
        model, ids = prepared(url, args.document_characters)
        # Threads, pools and the first requests of each kind take memory once.
        load(url, model, ids, args, min(5.0, args.seconds / 4), Counts())
        begin = memory(url, pid)
        load(url, model, ids, args, args.seconds, counts)
        end = memory(url, pid)
    show(counts, args.seconds, begin, end)
    return 1 if counts.errors or not counts.requests else 0


def parser() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(description="Put a server under load.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="smollm2", help="of the server that is started")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, for its memory")
    parser.add_argument("--document-characters", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=16)
    return parser


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Give address and process of a server."""
    if args.url:
        yield args.url, args.pid
        return
    command = [sys.executable, "-m", "kvboost_rag.cli", "serve", "--model", args.model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+?(?=/v1)", process.stdout.readline() if process.stdout else "")
        if address is None:
            raise SystemExit("the server did not start")
        yield address[0], process.pid
    finally:
        process.terminate()
        process.communicate()


def prepared(url: str, characters: int) -> tuple[str, list[str]]:
    """Add documents; return the model's name and their ids."""
    documents = [{"id": d.id, "text": d.text[:characters]} for d in demo_documents()]
    with httpx.Client(base_url=url, timeout=600) as client:
        client.post("/v1/documents", json={"documents": documents}).raise_for_status()
        model: str = client.get("/v1/models").json()["data"][0]["id"]
    return model, [document["id"] for document in documents]


def load(url: str, model: str, ids: Sequence[str], args: argparse.Namespace, seconds: float, counts: Counts) -> None:
    """Let all clients ask until the time is over."""
    end = time.monotonic() + seconds
    work = [
        threading.Thread(target=ask_on, args=(url, model, ids, args.max_tokens, seed, end, counts))
        for seed in range(args.clients)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


def ask_on(
    url: str, model: str, ids: Sequence[str], max_tokens: int, seed: int, end: float, counts: Counts
) -> None:
    """Ask until the time is over, with reuse and without in turn."""
    chance = random.Random(seed)
    reuse = bool(seed % 2)
    with httpx.Client(base_url=url, timeout=600) as client:
        while time.monotonic() < end:
            reuse = not reuse
            body = {
                "model": model, "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}], "stream": True,
                "documents": chance.sample(list(ids), 3), "reuse": reuse, "max_tokens": max_tokens, "temperature": 0,
            }  # fmt: skip
            try:
                ask(client, body, chance.random() < LEAVES, counts)
            except (httpx.HTTPError, ValueError) as error:
                counts.errors.append(repr(error))


def ask(client: httpx.Client, body: dict[str, object], leaves: bool, counts: Counts) -> None:
    """Ask once, and leave at the first token if that is wanted."""
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        # The server begins to answer with the first token.
        next(lines)
        counts.ttft[bool(body["reuse"])].append(time.perf_counter() - start)
        counts.requests += 1
        if leaves:
            counts.left += 1
            return
        rest = list(lines)
    if rest[-1] != "[DONE]":
        raise ValueError(f"a stream broke off: {json.dumps(rest[-1])[:200]}")


def memory(url: str, pid: int | None) -> tuple[float, float] | None:
    """Return the MiB that a process holds and those of earlier prompts' KV in it; None where that can not be told."""
    status = Path(f"/proc/{pid}/status")
    if pid is None or not status.is_file():
        return None
    held = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    kept = re.search(r'kvboost_kv_bytes\{tier="earlier_prompts"\} (\S+)', httpx.get(f"{url}/metrics", timeout=60).text)
    return (int(held[1]) / 1024, float(kept[1]) / 2**20) if held and kept else None


def show(
    counts: Counts, seconds: float, begin: tuple[float, float] | None, end: tuple[float, float] | None
) -> None:
    """Print what happened."""
    print(
        f"{counts.requests} requests, {len(counts.errors)} errors, {counts.left} broken off by the client, "
        f"in {seconds:.0f} s"
    )
    for reuse, name in ((True, "with reuse"), (False, "without reuse")):
        times = sorted(counts.ttft[reuse]) or [float("nan")]
        p50, p95 = (times[min(len(times) - 1, int(share * len(times)))] * 1000 for share in (0.5, 0.95))
        print(f"TTFT {name:<14} p50 {p50:6.0f} ms   p95 {p95:6.0f} ms   ({len(times)} requests)")
    if begin is not None and end is not None:
        print(f"memory of the server: {begin[0]:.1f} MiB at the start, {end[0]:.1f} MiB at the end")
        print(f"earlier prompts in it: {begin[1]:.1f} MiB at the start, {end[1]:.1f} MiB at the end")
    for error in counts.errors[:5]:
        print(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
