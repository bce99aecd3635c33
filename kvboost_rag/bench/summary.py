"""Figures of many samples to one line a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvboost_rag.bench.bootstrap import paired_difference

__all__ = ["format_table", "summarise"]

_COLUMNS = (
    ("method", "", "{}"),
    ("n", "n", "{}"),
    ("TTFT", "ttft_ratio", "{:.3f}"),
    ("ms", "ttft_ms", "{:.0f}"),
    ("recomputed", "recomputed_share", "{:.3f}"),
    ("reused", "reused_share", "{:.3f}"),
    ("KL", "kl", "{:.4f}"),
    ("KL p95", "kl_p95", "{:.4f}"),
    ("top-1", "top1", "{:.3f}"),
    ("same 32", "exact32", "{:.3f}"),
    ("F1", "f1", "{:.3f}"),
    ("EM", "em", "{:.3f}"),
    ("F1 - full's, 95 %", "f1_difference", "{0[0]:+.3f} ({0[1]:+.3f} to {0[2]:+.3f})"),
    ("F1*", "f1_when_full_right", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
)


def summarise(records: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """Sum up measured samples.

    Parameters
    ----------
    records
        As :meth:`kvboost_rag.bench.measure.Meter.measure` gives them, at least one.
    methods
        The methods in them.

    Returns
    -------
    dict[str, Any]
        ``summary``: for each method n, the median of ttft_ratio and ttft_ms, the mean of recomputed_share,
        reused_share, kl, top1, exact32, f1, em and accuracy, and kl_median, kl_p95 and kl_max over the samples' means;
        f1, em and accuracy once more over the samples that full prefill gets right. A mean of nothing is None.
        f1_difference and em_difference: mean, lower and upper end of the difference to full prefill, see
        :func:`kvboost_rag.bench.bootstrap.paired_difference`; None where a sample has no such figure.
        ``full_failures``: how many samples full prefill gets wrong (F1 of 0, or another letter).
        ``ingest``: documents, tokens and seconds, over all samples.
    """
    full = _of(records, "full")
    right = [record for record in records if not _failed(record["methods"]["full"])]
    ingest = {key: sum(r["ingest"][key] for r in records) for key in ("documents", "tokens", "seconds")}
    return {
        "summary": {name: _summary(_of(records, name), _of(right, name), full) for name in methods},
        "full_failures": len(records) - len(right),
        "ingest": ingest,
    }


def _of(records: Sequence[Mapping[str, Any]], method: str) -> list[Mapping[str, Any]]:
    return [record["methods"][method] for record in records]


def _failed(full: Mapping[str, Any]) -> bool:
    return not (full["f1"] if full["accuracy"] is None else full["accuracy"])


def _summary(
    rows: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    kl = np.array([row["kl"] for row in rows])
    out: dict[str, Any] = {"n": len(rows)}
    out |= {key: float(np.median([row[key] for row in rows])) for key in ("ttft_ratio", "ttft_ms")}
    out |= {key: _mean(rows, key) for key in ("recomputed_share", "reused_share", "kl")}
    out |= {"kl_median": float(np.median(kl)), "kl_p95": float(np.percentile(kl, 95)), "kl_max": float(kl.max())}
    out |= {key: _mean(rows, key) for key in ("top1", "exact32", "f1", "em", "accuracy")}
    out |= {f"{key}_difference": _difference(rows, full, key) for key in ("f1", "em")}
    return out | {f"{key}_when_full_right": _mean(right, key) for key in ("f1", "em", "accuracy")}


def _difference(
    rows: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]], key: str
) -> list[float] | None:
    values, reference = ([row[key] for row in side] for side in (rows, full))
    return None if None in values or None in reference else list(paired_difference(values, reference))


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(np.mean(values)) if values else None


def format_table(result: Mapping[str, Any]) -> str:
    """Draw the summary as text.

    Parameters
    ----------
    result
        As :func:`kvboost_rag.bench.run_bench` returns it.
    """
    summary = result["summary"]
    with_choices = any(row["accuracy"] is not None for row in summary.values())
    columns = [column for column in _COLUMNS if column[1] != "accuracy" or with_choices]
    cells = [[title for title, _, _ in columns]]
    cells += [[_cell(name, row, key, form) for _, key, form in columns] for name, row in summary.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], *_notes(result)])


def _cell(name: str, row: Mapping[str, Any], key: str, form: str) -> str:
    value = row[key] if key else name
    return "-" if value is None else form.format(value)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def _notes(result: Mapping[str, Any]) -> list[str]:
    setup, n = result["setup"], len(result["samples"])
    ratio = setup["ingest_ratio"]
    rate = "" if ratio is None else f", in batches at {ratio:.2f} of plain prefill's throughput"
    return [
        "TTFT: median ratio to full prefill of the same tokens, everything but ingest included. KL: nats per token.",
        f"F1*: over the samples that full prefill gets right; it fails {result['full_failures']} of {n}.",
        f"{setup['model']} ({setup['dtype']}, {setup['machine']['threads']} threads); ingest "
        f"{result['ingest']['tokens']} tokens in {result['ingest']['seconds']:.1f} s{rate}.",
    ]
