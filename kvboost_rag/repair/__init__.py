"""Repair methods: which reused tokens are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvboost_rag.policy import Policy
from kvboost_rag.repair.auto import Auto
from kvboost_rag.repair.base import Clues, Repair
from kvboost_rag.repair.cacheblend import CacheBlend
from kvboost_rag.repair.none import NoRepair
from kvboost_rag.repair.question import QuestionGuided
from kvboost_rag.repair.random import RandomRepair
from kvboost_rag.repair.selective import Selective
from kvboost_rag.repair.sensitive import Sensitive

__all__ = [
    "Auto", "CacheBlend", "Clues", "NoRepair", "QuestionGuided", "RandomRepair", "Repair", "Selective", "Sensitive",
    "check_policy", "parse_repair",
]  # fmt: skip

# name -> (class, the field that the bare value sets, the options with their types)
_METHODS: dict[str, tuple[Callable[..., Repair], str | None, dict[str, Callable[[str], Any]]]] = {
    "none": (NoRepair, None, {}),
    "selective": (Selective, "tokens", {"tokens": int}),
    "random": (RandomRepair, "ratio", {"ratio": float, "seed": int}),
    "sensitive": (Sensitive, "ratio", {"ratio": float}),
    "question": (
        QuestionGuided, "ratio", {"ratio": float, "depth": float, "weigh": lambda text: _boolean(text)}
    ),
    "cacheblend": (
        CacheBlend,
        "ratio",
        {"ratio": float, "probe_layer": int, "deviation": str, "gradual": lambda text: _boolean(text)},
    ),
}

_SEEDED = ("sensitive", "question", "cacheblend")


def parse_repair(spec: str | Repair, policy: Policy | None = None) -> Repair:
    """Turn a specification into a repair method.

    Parameters
    ----------
    spec
        ``name[:value][:option=value ...]``, as ``selective:16`` or ``cacheblend:0.15:deviation=keys``; a method before
        ``+`` seeds the one behind it, as ``selective:8+cacheblend:0.15``. ``auto[:quality]`` takes what the policy
        names for a quality or a KL, as ``auto:safe``. An object passes through.
    policy
        What ``auto`` chooses from; None takes the shipped one for unknown models.

    Raises
    ------
    ValueError
        Naming what is not understood and what is known.
    """
    if isinstance(spec, Repair):
        return spec
    name, _, quality = spec.partition(":")
    if name == "auto":
        return _auto(quality or "standard", policy or Policy.shipped(""))
    return _parsed(spec)


def check_policy(policy: Policy, where: str) -> None:
    """Refuse a policy that names repairs there are not.

    Raises
    ------
    ValueError
        Naming the policy and the repair.
    """
    for point in policy.points:
        try:
            _parsed(point.repair)
        except ValueError as error:
            raise ValueError(f"policy {where} can not be used ({error}); calibrate again") from error


def _auto(quality: str, policy: Policy) -> Auto:
    point = policy.choose(quality)
    return Auto(quality, NoRepair(), reached=False) if point is None else Auto(quality, _parsed(point.repair))


def _parsed(spec: str) -> Repair:
    parts = spec.split("+")
    method = _parse_one(parts[0], None)
    for part in parts[1:]:
        method = _parse_one(part, method)
    return method


def _parse_one(text: str, seed: Repair | None) -> Repair:
    name, *fields = text.strip().split(":")
    if name not in _METHODS:
        raise ValueError(f"unknown repair {name!r}; known are auto, {', '.join(_METHODS)}")
    make, main, options = _METHODS[name]
    arguments: dict[str, Any] = {}
    for field in fields:
        option, equals, value = field.partition("=")
        if not equals:
            option, value = main or "", field
        if option not in options or option in arguments:
            raise ValueError(f"repair {name!r} does not understand {field!r}; its options are {', '.join(options)}")
        arguments[option] = _convert(name, option, value, options[option])
    if seed is None:
        return make(**arguments)
    if name not in _SEEDED:
        raise ValueError(f"only {', '.join(_SEEDED)} take a seed, as in selective:8+cacheblend:0.15; {name!r} does not")
    return make(**arguments, seed=seed)


def _convert(name: str, option: str, value: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"repair {name!r}: {option} can not be {value!r}") from error


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"
