"""A chunk's bytes as values of a key-value server: one value that tells of the others, and the others.

::

    KEY            head (magic, bytes of the whole, name of this write), then the first stripe
    KEY:WRITE:n    the n-th stripe, from 1 on

The value under KEY is written last, so that whoever finds it finds the stripes, until the server evicts some of them.
Each write has a name of its own, so that stripes of two writers are never put together.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HEAD_BYTES", "STRIPE_BYTES", "Head", "joined", "parse_head", "stripes_of"]

STRIPE_BYTES = 1 << 20
"""A server answers nobody else while it handles one value."""

_MAGIC = b"kvboost stripes\n"
_HEAD = struct.Struct(">16sQ16s")
HEAD_BYTES = _HEAD.size


@dataclass(frozen=True)
class Head:
    """What the value under a chunk's key says of the whole.

    Parameters
    ----------
    nbytes
        Of all stripes together.
    write
        16 bytes that name the write.
    """

    nbytes: int
    write: bytes

    @classmethod
    def of(cls, payload: bytes) -> Head:
        """Name a new write of a chunk's bytes."""
        return cls(len(payload), secrets.token_bytes(16))

    def pack(self) -> bytes:
        """Make the first :data:`HEAD_BYTES` bytes of the value."""
        return _HEAD.pack(_MAGIC, self.nbytes, self.write)

    @property
    def lengths(self) -> list[int]:
        """Bytes of each stripe."""
        return [min(STRIPE_BYTES, self.nbytes - start) for start in range(0, self.nbytes, STRIPE_BYTES)]

    def names(self, key: str) -> list[str]:
        """Keys of all stripes but the first."""
        return [f"{key}:{self.write.hex()}:{n}" for n in range(1, len(self.lengths))]


def parse_head(value: bytes, most_bytes: int) -> Head:
    """Read the beginning of the value under a chunk's key.

    Parameters
    ----------
    value
        At least its first :data:`HEAD_BYTES` bytes.
    most_bytes
        The whole can not have more.

    Raises
    ------
    ValueError
        If it is no head, or tells of more bytes.
    """
    if len(value) < HEAD_BYTES:
        raise ValueError(f"its value has {len(value)} bytes, too few for a head")
    magic, nbytes, write = _HEAD.unpack_from(value)
    if magic != _MAGIC:
        raise ValueError("its value begins with no head")
    if not 0 < nbytes <= most_bytes:
        raise ValueError(f"it would have {nbytes} bytes, and the chunk can not take more than {most_bytes}")
    return Head(nbytes, write)


def stripes_of(payload: bytes) -> list[bytes]:
    """Cut a chunk's bytes into stripes."""
    return [payload[start : start + STRIPE_BYTES] for start in range(0, len(payload), STRIPE_BYTES)]


def joined(head: Head, stripes: Sequence[bytes]) -> bytes:
    """Put a chunk's bytes together.

    Raises
    ------
    ValueError
        If a stripe is not as long as it should be; a missing one has no bytes.
    """
    for n, (stripe, length) in enumerate(zip(stripes, head.lengths, strict=True)):
        if len(stripe) != length:
            raise ValueError(f"stripe {n} has {len(stripe)} bytes, not {length}")
    return b"".join(stripes)
