"""The example program runs as it is printed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_rag.py"


def test_the_example_runs_and_is_short(engine, capsys):
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40
    # It asks for the model by its name, under which the engine of these tests is shared.
    runpy.run_path(str(EXAMPLE))
    first, second, third = capsys.readouterr().out.strip().splitlines()
    assert "blue room" in first + second
    assert all("prompt tokens came from stored KV" in line for line in (first, second))
    assert third
