"""Amounts of memory as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(size: int | str, name: str = "the size") -> int:
    """Turn an amount of memory into bytes.

    Parameters
    ----------
    size
        Bytes as an int, or text such as ``"4GiB"``, ``"512 MB"`` or ``"1.5 gib"``: a number, then B, kB, MB, GB or TB
        (powers of 1000) or KiB, MiB, GiB or TiB (powers of 1024), in any case; without a unit it is bytes.
    name
        What error messages call it.

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    ValueError
        If this is no amount of memory.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"{name} is {size}; give 0 or more bytes")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{name} is {size!r}, no amount of memory; write it as 4GiB, 512 MB or a number of bytes")
    unit = _UNITS[match[2].lower()]
    whole, _, fraction = match[1].partition(".")
    # In integers: a float would be off by bytes from 2**53 on.
    return int(whole) * unit + int(fraction or 0) * unit // int(10 ** len(fraction))
