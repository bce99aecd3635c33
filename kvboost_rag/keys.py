"""Keys of chunks: hashes that are the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from kvboost_rag.types import TokenIds

__all__ = ["chain", "content_key", "fingerprint_of", "prefix_seed"]

_DIGEST_BYTES = 16
# No two kinds of key ever hash alike.
_SEED, _CHAIN, _CONTENT, _FINGERPRINT = b"kvb1seed", b"kvb1chai", b"kvb1cont", b"kvb1fing"


def fingerprint_of(parts: Mapping[str, str]) -> str:
    """Digest of everything, by name, that KV depends on besides the tokens.

    Parameters
    ----------
    parts
        Name to value, such as ``{"weights": ..., "dtype": ...}``; their order does not count.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    ValueError
        If there are no parts: the digest would be the same for every model.
    """
    if not parts:
        raise ValueError("a fingerprint needs at least one part: name what the KV depends on, for example the weights")
    return _digest(_FINGERPRINT, (_framed(part) for item in sorted(parts.items()) for part in item))


def prefix_seed(fingerprint: str) -> str:
    """Prefix key of the empty prefix, the first ``previous`` of a chain.

    Parameters
    ----------
    fingerprint
        Any text that identifies the model, see `fingerprint_of`.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    return _digest(_SEED, [_framed(fingerprint)])


def chain(previous: str, token_ids: TokenIds) -> str:
    """Prefix key of a prefix that is one chunk longer.

    The boundaries are part of the key: chaining ``[a]`` and then ``[b]`` differs from chaining ``[a, b]``, because
    chunks cut elsewhere are other entries of the store.

    Parameters
    ----------
    previous
        Prefix key of what comes before: 32 hexadecimal digits.
    token_ids
        ``[tokens]``, any integer dtype that int64 holds.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    ValueError
        If `previous` is no key or `token_ids` no vector of integers.
    """
    return _digest(_CHAIN, [_key_bytes(previous), *_token_frames(token_ids)])


def content_key(fingerprint: str, token_ids: TokenIds) -> str:
    """Key of a chunk's own tokens, whatever comes before them.

    Parameters
    ----------
    fingerprint
        Any text that identifies the model, see `fingerprint_of`.
    token_ids
        ``[tokens]``, any integer dtype that int64 holds.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    ValueError
        If `token_ids` is no vector of integers.
    """
    return _digest(_CONTENT, [_framed(fingerprint), *_token_frames(token_ids)])


def _digest(tag: bytes, frames: Iterable[bytes]) -> str:
    # Who writes documents must not be able to find two histories with one key: a hit compares the chunk's own tokens,
    # and for what came before them there is the key alone. No fast hash holds that.
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=tag)
    for frame in frames:
        state.update(frame)
    return state.hexdigest()


def _framed(text: str) -> bytes:
    # surrogatepass: a lone surrogate in a file name must not end in an exception.
    data = text.encode("utf-8", "surrogatepass")
    return _length(len(data)) + data


def _length(count: int) -> bytes:
    return count.to_bytes(8, "little")


def _token_frames(token_ids: TokenIds) -> tuple[bytes, bytes]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64):
        raise ValueError(
            f"token ids must be a vector of integers that fit int64, not {ids.dtype} of shape {ids.shape}: "
            "pass numpy.asarray(ids, dtype=numpy.int64)"
        )
    return _length(ids.size), ids.astype("<i8").tobytes()


def _key_bytes(key: str) -> bytes:
    try:
        data = bytes.fromhex(key)
    except ValueError:
        data = b""
    if len(data) != _DIGEST_BYTES:
        raise ValueError(f"{key!r} is no prefix key: start with prefix_seed(fingerprint) and pass what chain() returns")
    return data
