"""A chunk's stripes on a Redis server: written, read, looked at and removed, by their keys alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvboost_rag.store.striping import HEAD_BYTES, STRIPE_BYTES, Head, joined, parse_head, stripes_of

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["clear", "fetch", "place", "pointer", "remove", "whole"]

# A head that tells of more is not followed.
_MOST_BYTES = 1 << 32
_LONGEST_POINTER = 128


async def place(redis: Redis, key: str, head: Head, payload: bytes, ttl: int) -> None:
    """Write a chunk's stripes, and last the value that makes them one; nothing if another writer was first.

    Everything expires. Whoever breaks this off has to :func:`clear`.
    """
    from redis.exceptions import ResponseError

    stripes = stripes_of(payload)
    try:
        for name, stripe in zip(head.names(key), stripes[1:], strict=True):
            await redis.set(name, stripe, ex=ttl)
        is_placed = await redis.set(key, head.pack() + stripes[0], ex=ttl, nx=True)
    except ResponseError:
        # A full server still removes.
        await clear(redis, key, head)
        raise
    if not is_placed:
        await clear(redis, key, head)


async def clear(redis: Redis, key: str, head: Head) -> None:
    """Remove the stripes of a write, unless it is the one that came first.

    A command whose answer was lost may have been carried out, and was then sent once more.
    """
    names = head.names(key)
    if names and await _head_at(redis, key) != head:
        await _unlink(redis, names)


async def fetch(redis: Redis, key: str, most_bytes: int) -> bytes | None:
    """Read a chunk's bytes; None if it is not there. No more is ever asked for than the chunk can have.

    Raises
    ------
    ValueError
        If a stripe is missing, or something is not as it was written.
    """
    first = (await _ranges(redis, [key], HEAD_BYTES + STRIPE_BYTES))[0]
    if not first:
        return None
    head = parse_head(first, most_bytes)
    rest = await _ranges(redis, head.names(key), STRIPE_BYTES)
    return joined(head, [first[HEAD_BYTES:], *rest])


async def whole(redis: Redis, key: str) -> bool:
    """Whether a chunk is there with all its stripes, each of the right length.

    Raises
    ------
    ValueError
        If something is there that is not.
    """
    value = (await _ranges(redis, [key], HEAD_BYTES - 1))[0]
    if not value:
        return False
    head = parse_head(value, _MOST_BYTES)
    lengths = await _lengths(redis, [key, *head.names(key)])
    if [lengths[0] - HEAD_BYTES, *lengths[1:]] != head.lengths:
        raise ValueError("a stripe is missing or has another length")
    return True


async def remove(redis: Redis, key: str, *others: str) -> None:
    """Remove a chunk, first the value that makes it one, and other keys with it."""
    head = await _head_at(redis, key)
    await _unlink(redis, [key])
    await _unlink(redis, [*(head.names(key) if head else ()), *others])


async def pointer(redis: Redis, key: str) -> str:
    """Read a value that is a prefix key; empty if there is none, nonsense if somebody else wrote it."""
    try:
        value = (await _ranges(redis, [key], _LONGEST_POINTER))[0]
    except ValueError:
        return ""
    return value.decode("latin-1")


async def _head_at(redis: Redis, key: str) -> Head | None:
    """Read who wrote a chunk; None if it was nobody of us, or nothing is there."""
    try:
        return parse_head((await _ranges(redis, [key], HEAD_BYTES - 1))[0], _MOST_BYTES)
    except ValueError:
        return None


async def _unlink(redis: Redis, names: Sequence[str]) -> None:
    if names:
        await redis.unlink(*names)


async def _ranges(redis: Redis, names: Sequence[str], last: int) -> list[bytes]:
    """Read bytes ``0 .. last`` of values in one go; a missing value has none."""
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        pipeline.getrange(name, 0, last)
    return await _strings(pipeline)


async def _lengths(redis: Redis, names: Sequence[str]) -> list[int]:
    """Look up the bytes of values in one go; a missing value has none."""
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        pipeline.strlen(name)
    return await _strings(pipeline)


async def _strings(pipeline: Any) -> list[Any]:
    """Get the results of commands on values, which may be of another type.

    Raises
    ------
    ValueError
        If one is.
    """
    results = await pipeline.execute(raise_on_error=False)
    for result in results:
        if isinstance(result, Exception):
            if str(result).startswith("WRONGTYPE"):
                raise ValueError("its value is of another type")
            raise result
    return list(results)
