"""Chooses a token from logits."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from kvboost_rag.errors import ModelOutputError

__all__ = ["TokenChooser", "check_shape", "make_generator"]


class TokenChooser:
    """Chooses tokens from logits and remembers them for the processors.

    Parameters
    ----------
    processors
        Called as ``processors(ids [1, tokens], scores [1, vocab])``.
    generator
        Where sampling takes its randomness from, on the device of the logits; None is greedy.
    ids
        ``[tokens]``, the prompt, on the device of the logits.
    """

    def __init__(self, processors: LogitsProcessorList, generator: torch.Generator | None, ids: Tensor) -> None:
        self._processors = processors
        self._generator = generator
        self._ids = ids.unsqueeze(0)

    @torch.inference_mode()
    def __call__(self, logits: Tensor) -> int:
        """Choose the next token.

        Parameters
        ----------
        logits
            ``[vocab]``, any float dtype; scores are float32, as in ``generate``. Not changed.

        Raises
        ------
        ValueError
            If the shape is another.
        ModelOutputError
            If the logits hold NaN or +inf, or nothing but -inf, before or after the processors.
        """
        check_shape(logits)
        # The copy keeps processors that work in place away from the model's tensor.
        scores = logits.to(self._ids.device, torch.float32, copy=True).unsqueeze(0)
        _check_finite(scores, "the model's logits", "load the model in float32 or bfloat16 rather than float16")
        if self._processors:
            scores = self._processors(cast(LongTensor, self._ids), scores)
            _check_finite(scores, "the processed logits", "relax bans and penalties in the generation config")
        chosen = self._pick(scores)
        self._ids = torch.cat([self._ids, chosen], dim=1)
        return int(chosen)

    def _pick(self, scores: Tensor) -> Tensor:
        if self._generator is None:
            return scores.argmax(dim=-1, keepdim=True)
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)


def make_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """Make a random generator of its own.

    Parameters
    ----------
    seed
        Any 64-bit number, or None to take one from the operating system.
    device
        Where the logits are.
    """
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(int(seed))
    return generator


def check_shape(logits: Tensor) -> None:
    """Raise ValueError unless these are the logits of one position."""
    if logits.dim() != 1 or not logits.numel():
        raise ValueError(f"logits have shape {tuple(logits.shape)}; pass those of one position, [vocab]")


def _check_finite(scores: Tensor, what: str, remedy: str) -> None:
    # One number shows all cases: NaN wins every maximum, +inf is one, and only -inf gives -inf.
    top = float(scores.max())
    if not math.isfinite(top):
        raise ModelOutputError(f"no token can be chosen, because the maximum of {what} is {top}; {remedy}")
