"""The examples of docs/server.md run as they are printed, in their order, against a server on the real small model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")
for _needed in ("openai", "langchain_openai", "llama_index.llms.openai_like"):
    pytest.importorskip(_needed, reason=f"an example needs {_needed}")

from live_server import live_server  # noqa: E402

PAGE = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
EXAMPLES = re.findall(r"```(bash|python)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.real
def test_the_pages_examples_run(smollm2, capsys):
    assert [language for language, _ in EXAMPLES] == ["bash"] * 2 + ["python"] * 4
    with live_server(model=smollm2[0], tokenizer=smollm2[1], name="smollm2", chunker=None, repair=None) as live:
        shown = [_run(language, code.replace("http://127.0.0.1:8000", live.url), capsys) for language, code in EXAMPLES]
    added, asked, client, langchain, llama_index, _ = shown
    assert [d["id"] for d in json.loads(added)["data"]] == ["rooms", "food"]
    answer = json.loads(asked)
    assert "blue" in answer["choices"][0]["message"]["content"]
    assert sum(n for d in answer["kvboost"]["documents"].values() for kind, n in d.items() if kind == "computed") == 0
    assert client.count("blue room") == 2
    assert int(re.search(r"(\d+) of", client)[1]) > 20
    assert int(re.search(r"'cache_read': (\d+)", langchain)[1]) > 20
    assert "blue" in llama_index


def test_the_readme_asks_as_the_page_does():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    asked = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    assert asked and all(("bash", code) in EXAMPLES for code in asked)


def _run(language: str, code: str, capsys) -> str:
    if language == "python":
        exec(compile(code, "docs/server.md", "exec"), {"__name__": "example"})
        return capsys.readouterr().out
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = [*shlex.split(code), "--silent", "--fail-with-body"]
    return subprocess.run(command, capture_output=True, timeout=300, check=True).stdout.decode()


def test_the_page_names_every_option_and_metric_that_exists():
    from kvboost_rag.cli import _parser

    known = set(re.findall(r"--[a-z-]+", _parser()._subparsers._group_actions[0].choices["serve"].format_help()))
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", PAGE)) - {"--no-deps"} <= known
