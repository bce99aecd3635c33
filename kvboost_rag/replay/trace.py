"""Requests for documents, a few of which are asked for much more often than most."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Request", "Trace", "TraceOptions", "make_trace"]


@dataclass(frozen=True)
class TraceOptions:
    """What a trace is made of.

    Parameters
    ----------
    requests, seed
        How many, and which.
    documents
        How many there are.
    shortest, longest
        Tokens of a document; lengths in between are spread evenly on a logarithmic scale, whatever the popularity.
    exponent
        Of Zipf's law: the n-th most popular document is asked for ``n ** -exponent`` times as often as the first. With
        1.0 and 5,000 documents the most popular 3 % get 61 % of the requests, as was counted for retrieval over
        Wikipedia (Jin et al., "RAGCache: Efficient Knowledge Caching for Retrieval-Augmented Generation", 2024).
    retrieved, used
        Documents a retriever returns for a request, and how many of them, the first, go into the prompt.
    popularity_half_life
        Requests after which half of the documents have swapped their popularity with another; None for never.
    """

    requests: int = 10_000
    seed: int = 0
    documents: int = 5_000
    shortest: int = 300
    longest: int = 4_000
    exponent: float = 1.0
    retrieved: int = 8
    used: int = 4
    popularity_half_life: float | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no trace."""
        if self.requests < 1 or self.seed < 0:
            raise ValueError(f"{self.requests} requests with seed {self.seed} can not be made; give at least 1, and 0")
        if not 1 <= self.used <= self.retrieved <= self.documents or not 1 <= self.shortest <= self.longest:
            raise ValueError("a request uses 1 or more of those retrieved, which are documents of 1 token or more")


@dataclass(frozen=True)
class Request:
    """Documents, by number, that a retriever returned, best first, and those that stood in the prompt."""

    retrieved: tuple[int, ...]
    used: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests, and the tokens of each document, ``[documents]`` int64."""

    tokens: npt.NDArray[np.int64]
    requests: tuple[Request, ...]


def make_trace(options: TraceOptions) -> Trace:
    """Draw a trace; the same options give the same one."""
    draw = np.random.default_rng(options.seed)
    low, high = math.log(options.shortest), math.log(options.longest)
    tokens = np.exp(draw.uniform(low, high, options.documents)).astype(np.int64)
    share = np.cumsum(np.arange(1, options.documents + 1) ** -options.exponent)
    by_rank = draw.permutation(options.documents)
    requests = []
    for _ in range(options.requests):
        _drift(by_rank, options.popularity_half_life, draw)
        retrieved = _distinct(by_rank, share, options.retrieved, draw)
        requests.append(Request(retrieved, retrieved[: options.used]))
    return Trace(tokens, tuple(requests))


def _drift(by_rank: npt.NDArray[np.int64], half_life: float | None, draw: np.random.Generator) -> None:
    """Let pairs of documents swap their popularity."""
    if half_life is None:
        return
    for _ in range(draw.poisson(len(by_rank) * math.log(2) / half_life / 2)):
        pair = draw.integers(0, len(by_rank), 2)
        by_rank[pair] = by_rank[pair[::-1]]


def _distinct(
    by_rank: npt.NDArray[np.int64], share: npt.NDArray[np.float64], count: int, draw: np.random.Generator
) -> tuple[int, ...]:
    """Draw documents by popularity, none twice."""
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        ranks = np.searchsorted(share, draw.random(2 * count) * share[-1], side="right")
        chosen.update(dict.fromkeys(by_rank[ranks].tolist()))
    return tuple(chosen)[:count]
