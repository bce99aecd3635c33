"""Which replica gets a request: the one that has the KV of its documents, unless that one is too busy.

Nothing is shared or remembered: whoever knows the names of the replicas comes to the same choice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

__all__ = ["choose_replica", "rank_replicas"]


def rank_replicas(documents: Mapping[str, float], replicas: Sequence[str]) -> list[str]:
    """Order replicas by how much of a request's documents is at home there.

    The home of a document is the replica that its name and the document's hash highest together (rendezvous hashing;
    Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998): a replica that comes or goes
    moves the documents that it gets or had, and no others. Replicas that tie are ordered by a hash of all documents.

    Parameters
    ----------
    documents
        Id of each document of the request to its size, in tokens or any other unit; 1 for all will do.
    replicas
        Their names.

    Returns
    -------
    list[str]
        All replicas, the best one first.

    Raises
    ------
    ValueError
        If there is no replica, or a name comes twice.
    """
    if not replicas or len(set(replicas)) != len(replicas):
        raise ValueError(f"replicas are {list(replicas)}; give one or more, each with a name of its own")
    at_home = dict.fromkeys(replicas, 0.0)
    for document, size in documents.items():
        at_home[_home(document, replicas)] += size
    together = "\0".join(sorted(documents))
    return sorted(replicas, key=lambda replica: (-at_home[replica], _hash(together, replica), replica))


def _home(document: str, replicas: Sequence[str]) -> str:
    return max(replicas, key=lambda replica: _hash(document, replica))


def choose_replica(documents: Mapping[str, float], loads: Mapping[str, int], spare: float = 1.25) -> str:
    """Choose a replica for a request: the first of :func:`rank_replicas` that is not too busy.

    None gets more than ``spare`` times the mean load, this request counted and rounded up (Mirrokni, Thorup and
    Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018), so that a popular document is served by several
    replicas, and the next ones in its order, which then have its KV, too.

    Parameters
    ----------
    documents
        As for :func:`rank_replicas`.
    loads
        Name of each replica to its requests that are not finished.
    spare
        1.0 balances strictly, and ``math.inf`` never sends a request elsewhere.

    Returns
    -------
    str
        Its name.

    Raises
    ------
    ValueError
        If there is no replica, or ``spare`` is below 1.
    """
    if not spare >= 1:
        raise ValueError(f"spare is {spare}; give 1 or more, or some load fits nowhere")
    ranked = rank_replicas(documents, list(loads))
    if math.isinf(spare):
        return ranked[0]
    limit = math.ceil(spare * (sum(loads.values()) + 1) / len(loads))
    return next(replica for replica in ranked if loads[replica] < limit)


def _hash(text: str, replica: str) -> bytes:
    # surrogatepass: a lone surrogate in a file name must not end in an exception.
    parts = (part.encode("utf-8", "surrogatepass") for part in (replica, text))
    return hashlib.blake2b(b"".join(len(p).to_bytes(8, "little") + p for p in parts), digest_size=16).digest()
