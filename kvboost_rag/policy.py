"""Which repair gives which quality, as measured: what ``repair="auto"`` chooses from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvboost_rag.cards import policy_card
from kvboost_rag.reading import read_bounded

__all__ = ["QUALITIES", "Policy", "PolicyPoint", "target_of"]

QUALITIES = {"floor": 0.08, "standard": 0.03, "safe": 0.01}
"""Mean KL to full prefill, in nats a token, that each quality stays under."""

# A method whose worst twentieth of samples is further off than this many times the target does not count.
_TAIL = 5.0
_LONGEST = 1 << 20
# Behind a family's name: measured with ``context_documents="generic"``.
_GENERIC = ", generic"


def target_of(quality: str | float) -> float:
    """Turn a quality by name, or a KL as a number or text, into a KL in nats a token.

    Raises
    ------
    ValueError
        Naming the qualities there are.
    """
    if isinstance(quality, str) and quality in QUALITIES:
        return QUALITIES[quality]
    try:
        target = float(quality)
    except ValueError:
        target = -1.0
    if not 0.0 < target < float("inf"):
        raise ValueError(f"quality is {quality!r}; pass {', '.join(QUALITIES)}, or a KL above 0 in nats a token")
    return target


@dataclass(frozen=True)
class PolicyPoint:
    """One measured repair.

    Parameters
    ----------
    repair
        Its specification.
    ttft_ratio
        Median TTFT as a share of full prefill.
    kl, kl_p95
        Mean and 95th percentile over samples of the KL to full prefill, nats a token.
    samples
        How many were measured.
    """

    repair: str
    ttft_ratio: float
    kl: float
    kl_p95: float
    samples: int

    def __post_init__(self) -> None:
        """Refuse figures that can not have been measured."""
        if not isinstance(self.repair, str) or not isinstance(self.samples, int):
            raise ValueError(f"repair {self.repair!r} is no text, or samples {self.samples!r} is no whole number")
        for name in ("ttft_ratio", "kl", "kl_p95"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} of {self.repair} is {value!r}, which is no figure")

    def reaches(self, target: float) -> bool:
        """Whether mean and tail stay under a target KL."""
        return self.kl <= target and self.kl_p95 <= _TAIL * target


@dataclass(frozen=True)
class Policy:
    """The frontier of a model: repairs with their cost and quality.

    Parameters
    ----------
    points
        At least one.
    source
        Where it was measured, for reports.
    """

    points: tuple[PolicyPoint, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse a policy that has nothing to choose from."""
        if not self.points:
            raise ValueError("a policy holds no points; measure at least one repair")

    def choose(self, quality: str | float) -> PolicyPoint | None:
        """Choose the cheapest point that reaches a quality; None if none does."""
        target = target_of(quality)
        reaching = [point for point in self.points if point.reaches(target)]
        return min(reaching, key=lambda point: point.ttft_ratio) if reaching else None

    @property
    def choices(self) -> dict[str, str | None]:
        """Repair that each of :data:`QUALITIES` gets; None where nothing reaches it."""
        chosen = {quality: self.choose(quality) for quality in QUALITIES}
        return {quality: None if point is None else point.repair for quality, point in chosen.items()}

    def _repr_html_(self) -> str:
        """Draw the points for notebooks."""
        return policy_card([asdict(point) for point in self.points], self.source, self.choices)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        writing = path.with_name(f".{path.name}.{os.getpid()}")
        text = json.dumps({"source": self.source, "points": [asdict(p) for p in self.points]}, indent=1)
        try:
            writing.write_text(text + "\n", encoding="utf-8")
            os.replace(writing, path)
        finally:
            writing.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ValueError
            If the file is no policy; calibrate again.
        """
        try:
            return _policy(json.loads(read_bounded(path.resolve(), _LONGEST)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a policy ({error}); remove it, or calibrate again") from error

    @classmethod
    def shipped(cls, family: str, *, generic: bool = False) -> Policy:
        """Give the policy that comes along for a model family (``config.model_type``).

        A family that was not measured gets the worse figure of all those that were, method by method.

        Parameters
        ----------
        family
            The model's.
        generic
            Whether documents are encoded after the generic texts. Where that was not measured, documents behind the
            head alone count.
        """
        known = _shipped()
        if generic and family + _GENERIC in known:
            return known[family + _GENERIC]
        plain = {name: policy for name, policy in known.items() if not name.endswith(_GENERIC)}
        return plain[family] if family in plain else _worst(plain)


def _policy(row: Mapping[str, Any]) -> Policy:
    return Policy(tuple(PolicyPoint(**point) for point in row["points"]), str(row["source"]))


@cache
def _shipped() -> dict[str, Policy]:
    text = (files("kvboost_rag") / "policies.json").read_text(encoding="utf-8")
    return {family: _policy(row) for family, row in json.loads(text).items()}


def _worst(known: Mapping[str, Policy]) -> Policy:
    groups: dict[str, list[PolicyPoint]] = {}
    for policy in known.values():
        for point in policy.points:
            groups.setdefault(point.repair, []).append(point)
    # A method that was measured on some families only says nothing of the others.
    points = tuple(_upper(group) for group in groups.values() if len(group) == len(known))
    return Policy(points, f"worst of {', '.join(known)}")


def _upper(group: Sequence[PolicyPoint]) -> PolicyPoint:
    return PolicyPoint(
        group[0].repair,
        max(p.ttft_ratio for p in group),
        max(p.kl for p in group),
        max(p.kl_p95 for p in group),
        min(p.samples for p in group),
    )
