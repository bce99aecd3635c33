"""The package's place beside LlamaIndex, and the example program."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import llama_index.llms.kvboost as package
import pytest
from llama_setup import EXAMPLES

FILES = sorted(Path(package.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_integration_sees_the_public_surface_only(path):
    modules = [n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    assert {module for module in modules if module and module.startswith("kvboost_rag")} <= {"kvboost_rag"}


def test_the_namespace_of_llamaindex_stays_open():
    folder = Path(package.__file__).parent
    assert (folder / "py.typed").is_file()
    assert not (folder.parent / "__init__.py").exists()
    assert not (folder.parents[1] / "__init__.py").exists()


def test_importing_uses_no_network_and_attaches_nothing():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "import llama_index.llms.kvboost\n"
        "from llama_index_instrumentation import root_dispatcher as root\n"
        "assert [type(h).__name__ for h in root.event_handlers] in ([], ['NullEventHandler']), root.event_handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.real
def test_the_example_runs_and_is_short(smollm2):
    path = EXAMPLES / "llama_index_quickstart.py"
    assert len(path.read_text().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=400, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "commune" in done.stdout
    assert len(re.findall(r"[1-9]\d* approximate", done.stdout)) == 2
