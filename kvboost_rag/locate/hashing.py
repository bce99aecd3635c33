"""Hashes of every window of a text, and a table of the hashes that matter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Hashes", "anchor_of", "anchors_of", "filter_of", "hash_windows", "slots"]

Hashes = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_BATCH = 4096


def hash_windows(text: str, width: int) -> Hashes:
    """Hash every window of a text.

    Parameters
    ----------
    text
        Any text, of any length.
    width
        Characters of a window, a power of two.

    Returns
    -------
    numpy.ndarray
        ``[max(0, len(text) - width + 1)]``: polynomial hashes modulo 2^64.
    """
    return _hash_rows(_codes(text), width)


def _codes(text: str) -> Hashes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)


def _hash_rows(codes: Hashes, width: int) -> Hashes:
    """Hash windows of the last axis, from halves, quarters and so on."""
    if codes.shape[-1] < width:
        return codes[..., :0]
    factor, span = _BASE, 1
    hashes = codes * np.uint64(_BASE)
    while span < width:
        hashes = hashes[..., :-span] + hashes[..., span:] * np.uint64(factor)
        factor, span = factor * factor % 2**64, 2 * span
    return hashes


def anchor_of(text: str, width: int) -> np.uint64:
    """Hash of the first `width` characters of one text, much faster than `anchors_of`."""
    anchor = 0
    for character in reversed(text[:width]):
        anchor = (anchor + ord(character)) * _BASE % 2**64
    return np.uint64(anchor)


def anchors_of(texts: Sequence[str], width: int) -> Hashes:
    """Hash of the first `width` characters of each text, white space before it apart, ``[texts]``."""
    starts = range(0, len(texts), _BATCH)
    batches = ["".join(text.lstrip()[:width] for text in texts[i : i + _BATCH]) for i in starts]
    return np.concatenate([_hash_rows(_codes(batch).reshape(-1, width), width)[:, 0] for batch in batches])


def filter_of(anchors: Hashes) -> npt.NDArray[np.bool_]:
    """Table that is true wherever an anchor may be, with at least 8 entries for each."""
    table = np.zeros(1 << (8 * len(anchors)).bit_length(), dtype=np.bool_)
    table[slots(anchors, table)] = True
    return table


def slots(hashes: Hashes, table: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Entry of the table for each hash, the same shape."""
    # The low bits of a polynomial hash depend on the low bits of the characters alone.
    return (hashes >> np.uint64(65 - table.size.bit_length())).astype(np.int64)
