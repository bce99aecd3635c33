"""The example programs and the README's example run as they are printed."""

from __future__ import annotations

import json
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
def test_readme_examples_run_and_the_first_is_short(smollm2, tmp_path):
    example, options = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 10
    out = run("-c", example)
    assert "blue" in out
    assert "approximate" in out
    run("-c", "from kvboost_rag import KVBoostEngine\n" + options.replace('"kv"', repr(str(tmp_path))))
    assert list(tmp_path.iterdir())


def test_readme_names_only_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "results").glob("*.json")), ids=lambda path: path.name)
def test_the_readme_table_comes_from_a_result(path):
    table = run(str(ROOT / "examples" / "readme_table.py"), str(path))
    assert "| full prefill | 1.00 | all | 0.000 (0.000) | 100.0 % |" in table
    if path.name == "hotpotqa_smollm2.json":
        readme = (ROOT / "README.md").read_text()
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len(rows) > 8
        assert all(row in readme for row in rows)


def test_the_policies_that_come_along_are_those_of_the_results():
    script = str(ROOT / "examples" / "policies.py")
    code = f"import json, runpy; print(json.dumps(runpy.run_path({script!r})['policies']()))"
    assert json.loads(run("-c", code)) == json.loads((ROOT / "kvboost_rag" / "policies.json").read_text())
