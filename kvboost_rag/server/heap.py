"""One heap for all threads of a server."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

__all__ = ["share_one_heap"]

# M_ARENA_MAX of glibc's malloc.h.
_ARENA_MAX: Final = -8


def share_one_heap() -> bool:
    """Keep glibc from giving each thread a heap of its own, for the rest of the process.

    Prompts of ever new lengths leave holes in every one of them, so that a server's memory grows for a long time.

    Returns
    -------
    bool
        Whether this is glibc and did it; other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, 1))
