"""What is worth keeping: a score a method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from kvboost_rag.types import ChunkKV
from kvboost_rag.usage import UsageLedger

__all__ = ["EvictionScore", "Importance", "LeastFrequentlyUsed", "LeastRecentlyUsed", "parse_eviction"]


class EvictionScore(ABC):
    """Gives the value of keeping a chunk."""

    @abstractmethod
    def value(self, entry: ChunkKV, usage: UsageLedger) -> float:
        """Return the value of keeping a chunk; the highest stay, and of equal ones the most recently touched.

        Parameters
        ----------
        entry
            The chunk, stored or offered.
        usage
            What happened to it, to be asked for its prefix key.

        Returns
        -------
        float
            Any float but NaN. It may rise with an event of the chunk, but must not change as time goes by: the order
            of chunks that nothing happens to is kept, not computed again.
        """


class LeastRecentlyUsed(EvictionScore):
    """``lru``: what was used longest ago goes first."""

    def value(self, entry: ChunkKV, usage: UsageLedger) -> float:
        """Return the number of the request that last used the chunk."""
        return usage.last(entry.chunk.key.prefix)


class LeastFrequentlyUsed(EvictionScore):
    """``lfu``: what was used in the fewest prompts goes first; uses before the last eviction count, too."""

    def value(self, entry: ChunkKV, usage: UsageLedger) -> float:
        """Return the number of uses."""
        return usage.usage(entry.chunk.key.prefix).used


class Importance(EvictionScore):
    """``importance``: what would cost the least to compute again, for each byte and weighted by its frequency.

    Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy", HP Laboratories HPL-98-69, 1998): frequency x cost / size, with ageing. Three things differ. Frequency
    counts retrievals beside uses, because a retriever says more of a document's popularity than the few documents that
    fit a prompt. It is remembered for chunks that are not stored, so that a popular one is known when it comes. Ageing
    is exponential decay, as in LRFU (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used
    and Least Frequently Used Policies", IEEE Transactions on Computers 50(12), 2001), which in logarithms adds the
    ledger's age to a score, where greedy-dual adds the score of what was evicted last.

    Cost is counted in tokens: the lengths of documents are too small for attention to outweigh the rest of a prefill.
    """

    def value(self, entry: ChunkKV, usage: UsageLedger) -> float:
        """Return log2 of decayed frequency x tokens / bytes, plus the ledger's age in half-lives."""
        tokens = len(entry.chunk.token_ids)
        return usage.heat(entry.chunk.key.prefix) + math.log2(tokens / entry.nbytes)


_METHODS: dict[str, type[EvictionScore]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "importance": Importance,
}


def parse_eviction(name: str | EvictionScore) -> EvictionScore:
    """Turn the name of a method into its score.

    Parameters
    ----------
    name
        ``lru``, ``lfu`` or ``importance``; a score passes through.

    Raises
    ------
    ValueError
        Naming what is known.
    """
    if isinstance(name, EvictionScore):
        return name
    if name not in _METHODS:
        raise ValueError(f"unknown eviction {name!r}; known are {', '.join(_METHODS)}")
    return _METHODS[name]()
