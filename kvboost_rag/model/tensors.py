"""Weights of any kind as the plain tensors they consist of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["plain_parts", "quantises_activations", "storage_bytes"]

# What the weights of torchao call it.
_ACTIVATIONS = ("act_quant_kwargs", "activation_quantization")


def plain_parts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Take a weight apart.

    Quantised weights (torchao's, for example) are subclasses of Tensor that hold packed values, scales and zero points
    as tensors of their own, and name them by PyTorch's protocol ``__tensor_flatten__``.

    Yields
    ------
    tuple[str, Tensor]
        What the part is, the subclass and its settings included, and a tensor that owns a storage. A weight that is
        none of these is its own only part.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    names, settings = flatten()
    kind = f"{type(tensor).__name__}|{settings!r}"
    for name in names:
        held: Tensor | None = getattr(tensor, name)
        if held is not None:
            yield from ((f"{kind}|{name}|{part}", plain) for part, plain in plain_parts(held))


def quantises_activations(tensor: Tensor) -> bool:
    """Whether what is multiplied by a weight is itself rounded to few bits before, anew for every token."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    settings = flatten()[1] if flatten else None
    return isinstance(settings, dict) and any(settings.get(name) is not None for name in _ACTIVATIONS)


def storage_bytes(tensor: Tensor, first: int, shape: tuple[int, int], step: int = 1) -> Tensor:
    """View of bytes of a tensor's storage: rows of ``shape`` that begin ``step`` bytes apart, uint8, where it lies."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, shape, (step, 1))
