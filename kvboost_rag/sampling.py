"""What a caller may ask of one answer: length, randomness and where to stop."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Sampling", "as_stops"]


class _Range(NamedTuple):
    field: str
    kind: Any
    accepts: Callable[[Any], bool]
    remedy: str


_RANGES = (
    _Range("max_tokens", numbers.Integral, lambda v: v >= 0, "pass a whole number of at least 0"),
    _Range(
        "temperature",
        numbers.Real,
        lambda v: v == 0 or 1e-8 <= v <= 10,
        "pass 0 for greedy decoding, or a number between 1e-8 and 10 (usual: 0.2 to 1.5) for sampling",
    ),
    _Range("top_p", numbers.Real, lambda v: 0 < v <= 1, "pass a number above 0 and up to 1, where 1 is off"),
    _Range("top_k", numbers.Integral, lambda v: v >= 0, "pass a whole number of at least 0, where 0 is off"),
    _Range("min_p", numbers.Real, lambda v: 0 <= v <= 1, "pass a number from 0 to 1, where 0 is off"),
    _Range(
        "repetition_penalty",
        numbers.Real,
        lambda v: 0 < v < math.inf,
        "pass a finite number above 0, where 1 is off",
    ),
    _Range("seed", numbers.Integral, lambda v: -(2**63) <= v < 2**64, "pass a whole number of at most 64 bits"),
)


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of one answer.

    None leaves a value to the model's generation config, and to transformers' own default where that is silent too
    (among them ``top_k`` 50 when sampling). The length limits of the generation config do not count: ``max_tokens``
    does.

    Parameters
    ----------
    max_tokens
        Most tokens to generate, the end-of-sequence token not counted. 0 generates nothing.
    temperature
        0 is greedy; above 0 samples. None samples only if the generation config has ``do_sample``.
    top_p
        Keep the likeliest tokens up to this much probability; 1 is off.
    top_k
        Keep this many of the likeliest tokens; 0 is off.
    min_p
        Keep tokens of at least this share of the likeliest token's probability; 0 is off.
    repetition_penalty
        Divides positive (multiplies negative) logits of every token of the prompt and the answer; 1 is off.
    seed
        Makes sampling repeatable on one machine. None draws a fresh seed from the operating system; torch's global
        generator is neither read nor changed. Without effect on greedy decoding.
    stop
        Strings that end the answer and are cut from it; `as_stops` makes this tuple from a string or a list.
    ignore_eos
        Go on to ``max_tokens`` through end-of-sequence tokens, which then count as ordinary tokens without text.

    Raises
    ------
    ValueError
        If a value is of the wrong type or out of range; the message names the values that are allowed.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for limits in _RANGES:
            _check_range(limits, getattr(self, limits.field))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} is not a bool; pass True or False")
        _check_stop(self.stop)


def as_stops(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Turn the usual ways of giving stop strings into the tuple that `Sampling` takes.

    Parameters
    ----------
    stop
        One string, several, or None for none.

    Returns
    -------
    tuple of str
        The strings without repetition, in the order given.

    Raises
    ------
    ValueError
        If one of them is empty or not a string.
    """
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    _check_stop(stops)
    return tuple(dict.fromkeys(stops))


def _check_range(limits: _Range, value: Any) -> None:
    if value is None and limits.field != "max_tokens":
        return
    typed = isinstance(value, limits.kind) and not isinstance(value, bool)
    if not typed or not limits.accepts(value):
        raise ValueError(f"{limits.field}={value!r} can not be used; {limits.remedy}")


def _check_stop(stop: Any) -> None:
    if not isinstance(stop, tuple):
        raise ValueError(f"stop={stop!r} is not a tuple of strings; pass stop=as_stops({stop!r})")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop holds {text!r}; remove it: stop strings are str and not empty")
