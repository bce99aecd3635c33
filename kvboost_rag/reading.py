"""Reading files that another user may have put in the place of ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular", "read_bounded"]

# Neither what a link leads to, nor a pipe that would be waited for. A system without such a flag has no such file.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, never through a symbolic link.

    Raises
    ------
    OSError
        If it can not be opened, or is a link.
    ValueError
        If it is a pipe or a device.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _SAFELY))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a whole file of at most ``limit`` bytes; raises as :func:`open_regular` does, also for a longer one."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content
