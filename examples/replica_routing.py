"""What sending requests to the replica that has their documents saves, through Ray Serve, on made-up requests.

Each request names one document, a few of which are popular, and asks for one token, so that its time is the time to
first token. Each of two replicas has room for a share of all documents' KV; with the shared tier a Redis server of its
own is behind them. Hits are tokens of documents that were computed neither in the prompt nor for it. Without
``--model`` a small model with random weights answers, which costs as much as a trained one and says nothing.
"""

import argparse
import asyncio
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import ray
from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from kvboost_rag import RedisTier
from kvboost_rag.loading import load_model
from kvboost_rag.replay import TraceOptions, make_trace
from kvboost_rag.replicas import ReplicaOptions, create_front, start_replicas, stop_replicas

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder (default: a small one with random weights)")
parser.add_argument("--requests", type=int, default=80, help="(default 80)")
parser.add_argument("--documents", type=int, default=24, help="of 200 to 600 tokens (default 24)")
parser.add_argument("--clients", type=int, default=2, help="requests at a time (default 2)")
parser.add_argument("--room", type=float, default=0.3, help="of a replica, as a share of all KV (default 0.3)")
args = parser.parse_args()
WORDS = "rain falls and rivers rise while old ships wait for wind that no one here has ever seen or heard".split()


def small_model(folder: Path) -> Path:
    """Make a model with random weights and the demo's tokenizer."""
    tokenizer = load_model("smollm2")[1]
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=4, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def token_bytes(model: Path) -> int:
    """Return the bytes of one token's KV in float32."""
    config = AutoConfig.from_pretrained(model)
    return 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


class AtRandom:
    """A handle that hides which documents a request names, so that chance decides where their home is."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.answer, self.broadcast, self._handle = self, handle.broadcast, handle

    def remote(self, *arguments: object, sizes: dict[str, float]) -> object:
        """Hand a request on."""
        return self._handle.answer.remote(*arguments, sizes={str(draw.random()): 1.0})


async def play(front: FastAPI, *, is_shared: bool) -> tuple[list[float], list[float]]:
    """Add the documents, send the requests, forget all; return what share of each one's document hit, and seconds."""
    requests, seen, hits, times = iter(trace.requests), set(), [], []

    async def send(client: httpx.AsyncClient) -> None:
        for request in requests:
            name, begun = str(request.used[0]), time.perf_counter()
            body = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "documents": [name]}
            answer = (await client.post("/v1/chat/completions", json=body | {"max_tokens": 1})).raise_for_status()
            times.append(time.perf_counter() - begun)
            place = (answer.headers["x-kvboost-replica"], name)
            kinds = answer.json()["kvboost"]["documents"][name]
            hits.append((is_shared or place in seen) * (1 - kinds.get("computed", 0) / sum(kinds.values())))
            seen.add(place)

    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=None) as client:
        for name, text in texts.items():
            added = (await client.post("/v1/documents", json={"id": name, "text": text})).raise_for_status()
            seen.add((added.headers["x-kvboost-replica"], name))
        await asyncio.gather(*(send(client) for _ in range(args.clients)))
        for name in texts:
            (await client.delete(f"/v1/documents/{name}")).raise_for_status()
    return hits, times


trace = make_trace(
    TraceOptions(requests=args.requests, documents=args.documents, shortest=200, longest=600, retrieved=1, used=1)
)
draw = random.Random(0)
texts = {str(n): " ".join(draw.choices(WORDS, k=int(tokens))) for n, tokens in enumerate(trace.tokens)}
with tempfile.TemporaryDirectory() as folder:
    model = Path(args.model) if args.model else small_model(Path(folder, "model"))
    budget = int(args.room * trace.tokens.sum() * token_bytes(model))
    server = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/socket", "--save", "", "--dir", folder]
    # Ray tells its makers about each cluster unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    print("| shared tier | routing | hit rate | first token, median | 95 % |\n|---|---|---|---|---|", flush=True)
    for is_shared in (False, True):
        with subprocess.Popen(server, stdout=subprocess.DEVNULL) as redis:
            tier = RedisTier(f"unix://{folder}/socket") if is_shared else None
            engine = {"max_memory_bytes": budget, "max_prefix_bytes": 0, "store": tier}
            options = ReplicaOptions(str(model), "m", engine=engine, resources={"num_cpus": 0.5})
            handle = start_replicas(options, 2)
            for routing, router in (("affinity", handle), ("random", AtRandom(handle))):
                hits, times = asyncio.run(play(create_front(router, options), is_shared=is_shared))
                median, slow = (1000 * np.quantile(times, q) for q in (0.5, 0.95))
                numbers = f"{np.mean(hits):.2f} | {median:,.0f} ms | {slow:,.0f} ms"
                print(f"| {'on' if is_shared else 'off'} | {routing} | {numbers} |", flush=True)
            stop_replicas()
            redis.terminate()
    ray.shutdown()
