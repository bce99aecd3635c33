"""Cards of what was measured: a policy, and the calibration that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvboost_rag.cards.style import card
from kvboost_rag.cards.tables import facts, table
from kvboost_rag.cards.text import safe

__all__ = ["calibration_card", "policy_card"]

_NAME_CHARACTERS = 80
_ROWS = 40
_POLICY = (
    ("repair", "name"), ("TTFT, full prefill = 1", "n"), ("KL, nats a token", "n"), ("p95", "n wide"),
    ("samples", "n wide"), ("auto takes it for", ""),
)  # fmt: skip
_CALIBRATION = (
    ("method", "name"), ("TTFT, full prefill = 1", "n"), ("ms", "n wide"), ("KL, nats a token", "n"),
    ("same next token", "n wide"), ("F1", "n wide"), ("auto takes it for", ""),
)  # fmt: skip


def policy_card(points: Sequence[Mapping[str, Any]], source: str, chosen: Mapping[str, str | None]) -> str:
    """Draw what :class:`kvboost_rag.policy.Policy` holds.

    Parameters
    ----------
    points
        Each with repair, ttft_ratio, kl, kl_p95 and samples.
    source
        Where they were measured.
    chosen
        For each quality the repair that reaches it at the lowest cost, or None.
    """
    rows = [
        (
            safe(point["repair"], _NAME_CHARACTERS), f"{point['ttft_ratio']:.3f}", f"{point['kl']:.4f}",
            f"{point['kl_p95']:.4f}", str(point["samples"]), _qualities(point["repair"], chosen),
        )
        for point in sorted(points, key=lambda point: point["ttft_ratio"])
    ]  # fmt: skip
    first = f"policy of {len(points)} repairs"
    return card([facts(first, [safe(source, _NAME_CHARACTERS)]), table(_POLICY, rows[:_ROWS]), *_notes(rows, chosen)])


def calibration_card(
    summary: Mapping[str, Mapping[str, Any]], source: str, file: str, chosen: Mapping[str, str | None]
) -> str:
    """Draw what :class:`kvboost_rag.calibrate.Calibration` holds.

    Parameters
    ----------
    summary
        Of each method, as :func:`kvboost_rag.bench.run_bench` gives it.
    source, chosen
        As for :func:`policy_card`.
    file
        Name of the policy's file, without its folder.
    """
    samples = max((row["n"] for row in summary.values()), default=0)
    rows = [
        (
            safe(method, _NAME_CHARACTERS), f"{row['ttft_ratio']:.3f}", f"{row['ttft_ms']:.0f}", f"{row['kl']:.4f}",
            f"{row['top1']:.1%}", f"{row['f1']:.3f}", _qualities(method, chosen),
        )
        for method, row in summary.items()
    ]  # fmt: skip
    kept = f"kept as <code>{safe(file, _NAME_CHARACTERS)}</code>"
    others = [f"{samples} questions", safe(source, _NAME_CHARACTERS), kept]
    return card([facts("calibration", others), table(_CALIBRATION, rows[:_ROWS]), *_notes(rows, chosen)])


def _qualities(repair: str, chosen: Mapping[str, str | None]) -> str:
    return ", ".join(f"<b>{safe(q, 40)}</b>" for q, name in chosen.items() if name == repair)


def _notes(rows: Sequence[object], chosen: Mapping[str, str | None]) -> Iterator[str]:
    if len(rows) > _ROWS:
        yield f'<p class="soft">{len(rows) - _ROWS} more rows are not listed.</p>'
    missing = [safe(quality, 40) for quality, name in chosen.items() if name is None]
    if missing:
        yield f'<p class="soft">auto:{", auto:".join(missing)} computes everything: nothing came that close.</p>'
    yield '<p class="soft">KL is the distance to full prefill’s own answer; 0 is the same.</p>'
