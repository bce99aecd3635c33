"""Chunks on a Redis server that several machines share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from kvboost_rag.owner import Owner
from kvboost_rag.store.base import ChunkStore, same_tokens
from kvboost_rag.store.breaker import Breaker, FaultLog
from kvboost_rag.store.chunk_file import parse_chunk, serialise
from kvboost_rag.store.codec import check_entry, most_bytes
from kvboost_rag.store.header import DAMAGE, FORMAT, LONGEST_HEADER
from kvboost_rag.store.layout import is_name
from kvboost_rag.store.redis_client import RedisClient, RedisFault
from kvboost_rag.store.redis_tier import RedisTier
from kvboost_rag.store.redis_values import clear, fetch, place, pointer, remove, whole
from kvboost_rag.store.striping import Head
from kvboost_rag.types import ChunkKey, ChunkKV, TokenIds

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["RedisStore"]

# A release that lays values out otherwise, or reads chunks otherwise, must not take these for damaged and remove them.
_VERSION = f"1.{FORMAT.rpartition(' ')[2]}"
# A read may take as long as computing, and this much longer: less is not noticed.
_GRACE_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_WRITE_SECONDS = 10.0
_WRITE_BYTES_A_SECOND = 1 << 22

_Result = TypeVar("_Result")


@dataclass
class _Traffic:
    """What went over the connection."""

    hits: int = 0
    nbytes: int = 0


class RedisStore(ChunkStore):
    """Keep chunks on a Redis server, the bytes that a folder would hold, in stripes.

    A chunk that was put is there when :meth:`put` returns, until it is deleted, evicted by the server, or older than
    the tier allows. The server may be away, slow, full, or give back anything at all: that is a miss and a log line,
    and after failures in a row nothing is tried for a while. Safe to use from several threads, processes and machines.

    What is counted or listed here is what this store wrote or read; what others wrote is found by its key.

    Parameters
    ----------
    tier
        Where the server is.
    identity
        Of the model, the canonical context and the KV's dtype: only entries of this identity are seen. Letters,
        digits, ``_`` and ``-``.
    shape, dtype
        Layers, key-value heads and head dimension of the model's KV, and its dtype; anything else is damaged.
    prefill_rate
        Tokens a second that can be computed; a read that takes longer is given up.
    read_only
        Whether nothing at all is written or removed.
    owner
        Who signs what is written, and must have signed what is read; None takes anybody's chunks.

    Raises
    ------
    ImportError
        If the package ``redis`` is missing.
    ValueError
        If the identity can not be part of a key.
    """

    def __init__(
        self,
        tier: RedisTier,
        identity: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        prefill_rate: float,
        read_only: bool = False,
        owner: Owner | None = None,
    ) -> None:
        if not is_name(identity):
            raise ValueError(f"identity {identity!r} can not be part of a key; use letters, digits, _ and - alone")
        self._tier = tier
        self._identity = identity
        self._shape = shape
        self._dtype = dtype
        self._rate = prefill_rate
        self._read_only = read_only
        self._owner = owner
        self._client = RedisClient(tier)
        self._reading, self._writing = Breaker(), Breaker()
        self._log = FaultLog()
        # Bytes of the chunks that were written or read, by prefix key.
        self._seen: dict[str, int] = {}
        self._traffic = _Traffic()
        # Writes that were broken off, whose stripes may still be there; used by the client's event loop alone.
        self._broken: set[tuple[str, Head]] = set()

    def _key(self, *parts: str) -> str:
        return ":".join(("kvboost", _VERSION, self._identity, *parts))

    def _most(self, tokens: int) -> int:
        return LONGEST_HEADER + most_bytes(self._shape, self._dtype, tokens)

    # Writing -----------------------------------------------------------------------------------------------------

    def put(self, entry: ChunkKV) -> bool:
        """Write a chunk; False (and a log line) if the server does not take it."""
        key = entry.chunk.key
        if not is_name(key.prefix) or not is_name(key.content):
            raise ValueError(f"{key} can not be part of a server's keys; use letters, digits, _ and - alone")
        if self._read_only:
            return False
        # Two small questions, which spare the megabytes that another machine has written meanwhile.
        if key.prefix in self:
            return True
        payload = serialise(entry, self._identity, self._owner)
        seconds = _WRITE_SECONDS + len(payload) / _WRITE_BYTES_A_SECOND
        if not self._tried(
            self._writing, lambda redis: self._write(redis, key, payload), seconds,
            "KV was not written to the shared tier",
        ):  # fmt: skip
            return False
        self._seen[key.prefix] = len(payload)
        return True

    async def _write(self, redis: Redis, key: ChunkKey, payload: bytes) -> bool:
        await self._clear_broken(redis)
        name, head, ttl = self._key(key.prefix), Head.of(payload), self._tier.ttl_seconds
        try:
            await place(redis, name, head, payload, ttl)
        except BaseException:
            self._broken.add((name, head))
            raise
        await redis.set(self._key("content", key.content), key.prefix, ex=ttl)
        return True

    async def _clear_broken(self, redis: Redis) -> None:
        for name, head in list(self._broken):
            await clear(redis, name, head)
            self._broken.discard((name, head))

    def wants(self, prefix: str) -> bool:
        """Whether a chunk would be written as far as is known: not while the server is away or full."""
        return not self._read_only and not self._writing.is_open and not self._reading.is_open

    def delete(self, key: ChunkKey) -> None:
        """Remove a chunk for every machine; if the server is away (a log line says so) it stays until it expires."""
        self._seen.pop(key.prefix, None)
        if not self._read_only and is_name(key.prefix):
            self._remove(
                key.prefix, "KV was not removed from the shared tier and stays there until it expires",
                self._key("content", key.content),
            )  # fmt: skip

    def _remove(self, prefix: str, otherwise: str, *others: str) -> None:
        name = self._key(prefix)
        self._tried(self._writing, lambda redis: remove(redis, name, *others), _LOOK_SECONDS, otherwise)

    # Reading -----------------------------------------------------------------------------------------------------

    def get(self, prefix: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read and check a chunk, whichever machine wrote it, unless that takes longer than to compute it."""
        if not is_name(prefix):
            return None
        name, most = self._key(prefix), self._most(len(token_ids))
        seconds = _GRACE_SECONDS + len(token_ids) / self._rate
        try:
            payload = self._tried(self._reading, lambda redis: fetch(redis, name, most), seconds, "treated as a miss")
            if payload is None:
                self._seen.pop(prefix, None)
                return None
            entry = parse_chunk(payload, self._identity, prefix, self._owner)
            check_entry(entry, self._shape, self._dtype)
        except DAMAGE as damage:
            self._discard(prefix, damage)
            return None
        self._seen[prefix] = len(payload)
        self._traffic.hits += 1
        self._traffic.nbytes += len(payload)
        return entry if same_tokens(entry, token_ids) else None

    def _discard(self, prefix: str, damage: Exception) -> None:
        """Remove what can not be used, so that it is written again."""
        self._seen.pop(prefix, None)
        self._log.warn("damage", f"chunk {prefix} on {self._tier} can not be used ({damage}): treated as a miss")
        if not self._read_only:
            self._remove(prefix, "damaged KV was not removed from the shared tier")

    def find(self, content: str, token_ids: TokenIds) -> ChunkKV | None:
        """Read the chunk with this content key that was written last."""
        if not is_name(content):
            return None
        name = self._key("content", content)
        prefix = self._tried(self._reading, lambda redis: pointer(redis, name), _LOOK_SECONDS, "treated as a miss")
        return self.get(prefix, token_ids) if prefix else None

    def __contains__(self, prefix: object) -> bool:
        """Whether a chunk with this prefix key is there now, with all its stripes; no byte of them is looked at."""
        if not isinstance(prefix, str) or not is_name(prefix):
            return False
        name = self._key(prefix)
        try:
            return bool(self._tried(self._reading, lambda redis: whole(redis, name), _LOOK_SECONDS, "taken as missing"))
        except ValueError as damage:
            self._discard(prefix, damage)
            return False

    def _tried(
        self, breaker: Breaker, work: Callable[[Redis], Awaitable[_Result]], seconds: float, otherwise: str
    ) -> _Result | None:
        """Return what the server gives; None, and a log line, if it gives nothing."""
        if not breaker.allows():
            return None
        try:
            result = self._client.run(work, seconds)
        except RedisFault as fault:
            breaker.failed(for_sure=fault.kind != "slow")
            self._log.warn(f"{fault.kind} {otherwise}", f"{fault}: {otherwise}")
            return None
        except DAMAGE:
            breaker.succeeded()
            raise
        breaker.succeeded()
        return result

    # What is known of it -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        """Iterate over the prefix keys that this store wrote or read."""
        return iter(list(self._seen))

    def __len__(self) -> int:
        """Count the chunks that this store wrote or read."""
        return len(self._seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that this store wrote or read."""
        return sum(list(self._seen.values()))

    @property
    def shared_hits(self) -> int:
        """Chunks that were read here instead of being computed."""
        return self._traffic.hits

    def close(self) -> None:
        """Remove what writes that were broken off have left, if the server is there, and close the connections."""
        if self._broken:
            self._tried(self._writing, self._clear_broken, _LOOK_SECONDS, "stripes stay there until they expire")
        self._client.close()
