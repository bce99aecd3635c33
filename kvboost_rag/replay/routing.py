"""Ways to route requests to replicas, on made-up requests, through a real store for each replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvboost_rag.affinity import choose_replica
from kvboost_rag.replay.documents import make_documents
from kvboost_rag.replay.run import serve, store_of
from kvboost_rag.replay.trace import Trace
from kvboost_rag.store import MemoryStore

__all__ = ["ROUTINGS", "Routed", "replay_routing"]

Choice = Callable[[Mapping[str, float], Mapping[str, int], np.random.Generator], str]


def _random(documents: Mapping[str, float], loads: Mapping[str, int], draw: np.random.Generator) -> str:
    return list(loads)[int(draw.integers(len(loads)))]


def _least_busy(documents: Mapping[str, float], loads: Mapping[str, int], draw: np.random.Generator) -> str:
    fewest = min(loads.values())
    return _random(documents, {name: load for name, load in loads.items() if load == fewest}, draw)


def _affinity(spare: float) -> Choice:
    return lambda documents, loads, draw: choose_replica(documents, loads, spare)


ROUTINGS: dict[str, Choice] = {
    "random": _random,
    "least busy": _least_busy,
    "affinity": _affinity(1.25),
    "affinity, no spill": _affinity(float("inf")),
}
"""Ways to choose a replica, from documents with their tokens, loads, and chance."""


@dataclass(frozen=True)
class Routed:
    """What came of one way.

    Parameters
    ----------
    hit_rate
        Share of document tokens that the chosen replica had in memory, 0 to 1.
    median, slow
        Tokens that could have been computed until a request's were, waiting counted: the time to first token in units
        of one token's computing. The median and the 95th percentile.
    busiest
        Tokens that the busiest replica computed over the mean of all.
    """

    hit_rate: float
    median: float
    slow: float
    busiest: float


def replay_routing(
    trace: Trace, routing: str, *, replicas: int = 4, budget_share: float = 0.1, use: float = 0.7,
    question_tokens: int = 64, seed: int = 0,
) -> Routed:  # fmt: skip
    """Send a trace's requests to replicas, each of which computes one request after the other.

    Parameters
    ----------
    trace
        The requests.
    routing
        One of :data:`ROUTINGS`.
    replicas
        How many.
    budget_share
        Room in each replica, as a share of the KV of all documents.
    use
        How busy all replicas would be, 0 to 1, if half of the document tokens were computed; requests come at random
        (Poisson), as often as that takes, whatever the routing.
    question_tokens
        What a request computes besides what it misses.
    seed
        Of arrivals and of what is chosen by chance.

    Raises
    ------
    ValueError
        For a routing that is none.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing is {routing!r}; choose one of {', '.join(map(repr, ROUTINGS))}")
    draw, documents = np.random.default_rng(seed), make_documents(trace.tokens)
    budget = int(trace.tokens.sum() * budget_share)
    fleet = {f"replica {n}": _Replica(store_of(documents, budget)) for n in range(replicas)}
    wanted = [float(trace.tokens[list(request.used)].sum()) for request in trace.requests]
    pause = (question_tokens + np.mean(wanted) / 2) / (replicas * use)
    arrivals = np.cumsum(draw.exponential(pause, len(wanted)))
    waits, saved = [], 0
    for request, now in zip(trace.requests, arrivals, strict=True):
        sizes = {str(number): float(trace.tokens[number]) for number in request.used}
        loads = {name: replica.load(now) for name, replica in fleet.items()}
        replica = fleet[ROUTINGS[routing](sizes, loads, draw)]
        hit = serve(replica.store, request, documents)
        saved += hit
        waits.append(replica.compute(now, question_tokens + sum(sizes.values()) - hit))
    computed = [replica.computed for replica in fleet.values()]
    return Routed(
        saved / sum(wanted), float(np.median(waits)), float(np.quantile(waits, 0.95)),
        float(max(computed) / np.mean(computed)),
    )  # fmt: skip


class _Replica:
    """A store, and when its requests are finished."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.computed = 0.0
        self._ends: list[float] = []

    def load(self, now: float) -> int:
        self._ends = [end for end in self._ends if end > now]
        return len(self._ends)

    def compute(self, now: float, tokens: float) -> float:
        """Take a request in; return how long it takes, waiting for those before it."""
        end = max([now, *self._ends]) + tokens
        self._ends.append(end)
        self.computed += tokens
        return end - now
