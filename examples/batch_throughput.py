"""Throughput of concurrent requests against the same ones one after another, side by side in one process.

In each round the requests run with every concurrency in turn; medians of the rounds count. TTFT is measured from the
moment at which a client asks, ITL between two tokens of one answer. Every answer is compared with the serial one. The
ratio is one of wall seconds; beside it stands that of the process's CPU seconds, which a busy machine hardly changes.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median, quantiles

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

QUESTIONS = (
    "What is this about?",
    "Which names are told?",
    "Who did what, and when?",
    "Where does it take place?",
    "Tell it in one sentence.",
    "What is the oldest thing that is named here?",
    "Which numbers are given, and what for?",
    "What would a child like about it?",
)


@dataclass
class Answer:
    """Token ids of an answer, and the seconds since the request at which they came."""

    token_ids: tuple[int, ...]
    seconds: list[float]


@dataclass
class Round:
    """All requests of a round, and its seconds: on the wall, and of the CPU."""

    answers: list[Answer]
    seconds: float
    cpu_seconds: float


def chosen(number: int, count: int) -> list[Document]:
    """Give each request other documents, as long as there are any."""
    known = demo_documents()
    return [known[(number * count + i) % len(known)] for i in range(count)]


def asked(engine: KVBoostEngine, number: int, tokens: int, documents: int) -> Answer:
    """Send one request and note when its tokens come."""
    ids = [document.id for document in chosen(number, documents)]
    start, seconds, token_ids = time.perf_counter(), [], ()
    question = QUESTIONS[number % len(QUESTIONS)]
    for delta in engine.stream(question, documents=ids, max_tokens=tokens, temperature=0.0, ignore_eos=True):
        seconds += [time.perf_counter() - start] * len(delta.token_ids)
        token_ids += delta.token_ids
    return Answer(token_ids, seconds)


def measured(engine: KVBoostEngine, concurrency: int, options: argparse.Namespace) -> Round:
    """Run all requests, so many at a time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(concurrency) as pool:
        work = [pool.submit(asked, engine, i, options.tokens, options.documents) for i in range(options.requests)]
        answers = [future.result() for future in work]
    return Round(answers, time.perf_counter() - start, time.process_time() - cpu_start)


def summary(rounds: list[Round], serial: list[Round]) -> dict[str, float]:
    """Medians over the rounds; ratios are taken within each round."""
    tokens = sum(len(answer.token_ids) for answer in rounds[0].answers)
    answers = [answer for r in rounds for answer in r.answers]
    gaps = [b - a for answer in answers for a, b in zip(answer.seconds, answer.seconds[1:], strict=False)]
    same = [a.token_ids == b.token_ids for a, b in zip(rounds[0].answers, serial[0].answers, strict=True)]
    return {
        "tokens_per_s": tokens / median(r.seconds for r in rounds),
        "ratio": median(s.seconds / r.seconds for r, s in zip(rounds, serial, strict=True)),
        "cpu_ratio": median(s.cpu_seconds / r.cpu_seconds for r, s in zip(rounds, serial, strict=True)),
        "ttft_ms": 1000 * median(answer.seconds[0] for answer in answers),
        "itl_ms": 1000 * median(gaps),
        "itl_p95_ms": 1000 * quantiles(gaps, n=20)[-1],
        "same_answers": sum(same),
    }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--concurrency", type=int, nargs="*", default=[2, 4, 8], help="requests at a time (default 2 4 8)")
parser.add_argument("--requests", type=int, default=8, help="requests in a round (default 8)")
parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (default 64)")
parser.add_argument("--documents", type=int, default=2, help="documents in each prompt (default 2)")
parser.add_argument("--rounds", type=int, default=5, help="measurements; the median counts (default 5)")
parser.add_argument("--json", action="store_true", help="print JSON")
args = parser.parse_args()

levels = [1, *args.concurrency]
with KVBoostEngine.from_pretrained(args.model, max_batch=max(levels), max_prefix_bytes=0) as engine:
    used = [document for i in range(args.requests) for document in chosen(i, args.documents)]
    engine.add_documents({document.id: document for document in used}.values())
    asked(engine, 0, 4, args.documents)
    rounds: dict[int, list[Round]] = {level: [] for level in levels}
    for _ in range(args.rounds):
        for level in levels:
            rounds[level].append(measured(engine, level, args))
        latest = {level: own[-1] for level, own in rounds.items()}
        seconds = ", ".join(f"{level}: {r.seconds:.1f} ({r.cpu_seconds:.1f})" for level, r in latest.items())
        print(f"wall (CPU) seconds by requests at a time: {seconds}", file=sys.stderr, flush=True)
results = {level: summary(rounds[level], rounds[1]) for level in levels}
if args.json:
    print(json.dumps({"requests": args.requests, "tokens": args.tokens, "results": results}))
else:
    print(f"{args.requests} requests of {args.tokens} tokens, {args.documents} documents in each prompt")
    print("at a time  tokens/s  ratio  CPU ratio  TTFT ms  ITL ms  ITL p95 ms  serial text")
    for level, row in results.items():
        print(
            f"{level:9}  {row['tokens_per_s']:8.1f}  {row['ratio']:5.2f}  {row['cpu_ratio']:9.2f}  "
            f"{row['ttft_ms']:7.0f}  {row['itl_ms']:6.0f}  {row['itl_p95_ms']:10.0f}  "
            f"{row['same_answers']} of {args.requests}"
        )
