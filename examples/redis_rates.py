"""What it takes to read documents' KV from a Redis server, beside encoding them and beside a full prefill.

Reading is the stage ``plan`` of an engine that has nothing in memory: looking up, transfer, checksum. Of each time the
least of all rounds counts. Without ``--store`` a server of its own is started on a Unix socket and ended afterwards.
"""

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvboost_rag import KVBoostEngine, Report
from kvboost_rag.demo_documents import demo_documents
from kvboost_rag.loading import load_model
from kvboost_rag.quantize import KV_DTYPES

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--store", help="URL of a Redis server")
parser.add_argument("--model", default="smollm2")
parser.add_argument("--documents", type=int, default=8, help="of the demo's paragraphs (default 8)")
parser.add_argument("--rounds", type=int, default=3, help="measurements (default 3)")
args = parser.parse_args()


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Start a server and end it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "socket")
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as server:
            while not path.exists():
                time.sleep(0.01)
            try:
                yield f"unix://{path}"
            finally:
                server.terminate()


def measure(store: str, kv_dtype: str) -> str:
    """Encode, then read with new engines, and return a row of the table."""
    options = {"kv_dtype": kv_dtype, "store": store, "max_prefix_bytes": 0, "repair": "none"}
    with KVBoostEngine(model, tokenizer, **options) as first:
        start = time.perf_counter()
        first.add_documents(documents)
        encoding = time.perf_counter() - start
        tokens, nbytes = first.stats.document_tokens, first.stats.store_bytes
    reports = []
    for _ in range(args.rounds):
        with KVBoostEngine(model, tokenizer, **options) as engine:
            engine.add_documents(documents)
            reports.append((asked(engine), asked(engine)))
            if engine.stats.shared_hits < engine.stats.chunks:
                print(f"only {engine.stats.shared_hits} of {engine.stats.chunks} chunks came from the server in time")
    reading = min(cold.stages["plan"] - warm.stages["plan"] for cold, warm in reports)
    cold, warm = (min(pair[i].ttft for pair in reports) for i in (0, 1))
    return (
        f"{kv_dtype:<10} {tokens:>6} {nbytes / 2**20:>6.1f} {tokens / encoding:>9.0f} {tokens / reading:>9.0f} "
        f"{nbytes / reading / 2**20:>7.0f} {1000 * cold:>8.0f} {1000 * warm:>8.0f}"
    )


def asked(engine: KVBoostEngine, *, reuse: bool = True) -> Report:
    """Ask a question over all documents, for the first token alone."""
    return engine.generate("Why?", documents=documents, max_tokens=1, reuse=reuse).report


model, tokenizer = load_model(args.model)
documents = demo_documents()[: args.documents]
with contextlib.nullcontext(args.store) if args.store else own_server() as url:
    print(f"{'':<24} {'tokens/s':>19} {'MiB/s':>7} {'ms, first token':>17}")
    with KVBoostEngine(model, tokenizer) as plain:
        full = min(asked(plain, reuse=False).ttft for _ in range(args.rounds))
    print(f"full prefill: {1000 * full:.0f} ms to the first token")
    names = f"{'encode':>9} {'read':>9} {'read':>7} {'server':>8} {'memory':>8}"
    print(f"{'kv_dtype':<10} {'tokens':>6} {'MiB':>6} {names}")
    for name in KV_DTYPES:
        print(measure(url, name), flush=True)
