"""Pages of the site that are made when it is built: measured tables, the command line, the calculator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from break_even import Case, calculator

from kvboost_rag.bench.options import BASELINES
from kvboost_rag.cli import main
from kvboost_rag.policy import QUALITIES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "results"
README_RESULT = RESULTS / "hotpotqa_smollm2.json"

MEASURED = """\
# Measured

Every table is printed by `python examples/readme_table.py FILE` from a result that `kvboost-rag bench` wrote; this page
is made anew from the files each time the site is built. TTFT is the median ratio to full prefill of the same tokens,
side by side in one run, with everything but ingest in it; KL is over full prefill's own 32 greedy tokens. What the
methods are: [how it works](how-it-works.md#repair). How to make such a table of your own documents:
[choose quality](how-to/choose-quality.md).
"""

COMMAND_LINE = """\
# Command line

What `kvboost-rag COMMAND --help` prints. Every command works offline.
"""


def write_pages(folder: Path) -> None:
    """Write all pages into the folder of the documentation, those that are up to date excepted."""
    pages = {
        "measured.md": measured(),
        "reference/command-line.md": command_line(),
        "_generated/calculator.html": calculator(measured_case()),
    }
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        # An untouched file is not read again.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def measured() -> str:
    """Make a page of the table of every result, the README's first."""
    paths = sorted(RESULTS.rglob("*.json"), key=lambda path: (path != README_RESULT, len(path.parts), path))
    return MEASURED + "".join(_section(path) for path in paths)


def _section(path: Path) -> str:
    setup = json.loads(path.read_text(encoding="utf-8"))["setup"]
    script = str(ROOT / "examples" / "readme_table.py")
    with _captured(script, str(path)) as out:
        runpy.run_path(script, run_name="__main__")
    machine = setup["machine"]
    where = f"{setup['dtype']}, threads: {machine['threads']}, {machine['processor']} ({machine['device']})"
    name = path.relative_to(RESULTS).with_suffix("").as_posix()
    made = f"{setup['model']}, {where}. Repeat it by\n\n```text\n{_command(setup)}\n```"
    return f"\n## {name}\n\n{made}\n\n{out.getvalue()}"


def _command(setup: dict[str, Any]) -> str:
    given = {name: value for name, value in setup["options"].items() if value not in (None, False)}
    given["methods"] = ",".join(given["methods"])
    return "kvboost-rag bench " + " ".join(f"--{n.replace('_', '-')} {v}" for n, v in given.items()) + " --output FILE"


def command_line() -> str:
    """Make a page of the help of every command."""
    top = _help()
    commands = re.search(r"\{([a-z,-]+)\}", top)
    assert commands is not None, top
    sections = [f"\n## {name}\n\n```text\n{_help(name)}```\n" for name in commands.group(1).split(",")]
    return COMMAND_LINE + f"\n```text\n{top}```\n" + "".join(sections)


def _help(*command: str) -> str:
    with _captured() as out:
        main([*command, "--help"])
    return out.getvalue()


@contextlib.contextmanager
def _captured(*arguments: str) -> Iterator[io.StringIO]:
    """Catch what a command with these arguments prints, at the width of the page, and its exit."""
    with (
        mock.patch.dict(os.environ, COLUMNS="100"), mock.patch.object(sys, "argv", [*arguments] or sys.argv),
        contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit),
    ):  # fmt: skip
        yield out


def measured_case() -> Case:
    """Fill the calculator in with the README's result and its model."""
    result = json.loads(README_RESULT.read_text(encoding="utf-8"))
    return Case(
        prefill_rate=round(result["setup"]["ingest_rates"]["plain"]),
        ingest_ratio=round(result["setup"]["ingest_ratio"], 2),
        ttft_ratio=round(_cheapest(result["summary"]), 2),
        prompt_tokens=round(median(sample["prompt_tokens"] for sample in result["samples"])),
        layers=30, kv_heads=3, head_dim=64, bytes_a_number=4,
        documents=1000, document_tokens=round(result["ingest"]["tokens"] / result["ingest"]["documents"]),
        documents_a_prompt=5, prompts_a_day=1000,
    )  # fmt: skip


def _cheapest(summary: dict[str, Any]) -> float:
    """TTFT of the cheapest repair that reaches the quality ``standard``, full prefill = 1."""
    good = [row for name, row in summary.items() if name not in BASELINES and row["kl"] <= QUALITIES["standard"]]
    return float(min(row["ttft_ratio"] for row in good))


if __name__ == "__main__":
    write_pages(Path(__file__).parent)
