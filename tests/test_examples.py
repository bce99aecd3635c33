"""The example programs and the README's example run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [ROOT / "examples" / "quickstart.py"]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=400, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.real
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(path, smollm2):
    assert len(path.read_text().splitlines()) <= 40
    assert "blue room" in run(str(path))


@pytest.mark.real
def test_readme_example_runs_and_is_short(smollm2):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 10
    out = run("-c", code)
    assert "blue" in out
    assert "approximate" in out


def test_readme_names_only_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets
