"""Memory of finished requests, for the next one.

The KV of a long prompt takes tens of megabytes or more. Fresh memory of that size costs a page fault every few
kilobytes when stored KV is placed in it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["SpareMemory"]


class SpareMemory:
    """Keeps the latest buffers that were given back, one pair.

    Safe to use from several threads and from finalizers.
    """

    def __init__(self) -> None:
        # A finalizer may run in the middle of any method, in the same thread.
        self._lock = threading.RLock()
        self._pair: tuple[Tensor, Tensor] | None = None
        self._closed = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give two buffers of undefined content.

        Parameters
        ----------
        shape
            ``[layers, batch, kv_heads, slots, head_dim]`` with any number of slots; the buffers may have more.
        dtype, device
            Of the buffers.
        """
        with self._lock:
            pair, self._pair = self._pair, None
        if pair is not None and _fits(pair[0], shape, dtype, device):
            return pair
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)

    def give(self, keys: Tensor, values: Tensor) -> None:
        """Take buffers back for the next request; nobody else may hold them."""
        with self._lock:
            if not self._closed:
                self._pair = (keys, values)

    def close(self) -> None:
        """Release the memory, and what is given back from now on."""
        with self._lock:
            self._pair, self._closed = None, True


def _fits(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a buffer is large enough, but not so large that much of it would lie idle."""
    like = (*buffer.shape[:3], buffer.shape[4]) == (*shape[:3], shape[4])
    enough = shape[3] <= buffer.shape[3] <= 1.25 * shape[3]
    return like and enough and buffer.dtype == dtype and buffer.device == device
