"""The documentation: its code runs and prints what it says; pictures, tables and calculator are those of the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from doc_pages import DOCS, PAGES, ROOT, blocks, run_block, without_times

import kvboost_rag.engine
import kvboost_rag.loading
from kvboost_rag import KVBoostEngine

sys.path.insert(0, str(DOCS))
import draw_flow  # noqa: E402
import generate  # noqa: E402
from break_even import Case, answer, calculator  # noqa: E402

# test_server_docs.py runs it, shell and all, against a server.
SERVER = DOCS / "server.md"
WITH_CODE = [path for path in PAGES if blocks(path) and path != SERVER]
CASE = Case(
    prefill_rate=200, ingest_ratio=0.8, ttft_ratio=0.2, prompt_tokens=1000, documents=10_000, document_tokens=160,
    documents_a_prompt=5, prompts_a_day=500, layers=30, kv_heads=3, head_dim=64, bytes_a_number=4,
)  # fmt: skip


@pytest.fixture
def namespace(smollm2, monkeypatch, tmp_path):
    """Give a page a folder of its own and the model without loading it again; close what it leaves open."""
    load = kvboost_rag.loading.load_model

    def loaded_once(model, **options):
        return load(model, **options) if any(options.values()) or model != "smollm2" else smollm2

    for module in (kvboost_rag.engine, kvboost_rag.loading):
        monkeypatch.setattr(module, "load_model", loaded_once)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    yield names
    for value in names.values():
        if isinstance(value, KVBoostEngine):
            value.close()
    if "langchain_kvboost" in sys.modules:
        sys.modules["langchain_kvboost"].release_engines()


@pytest.mark.real
@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_code_runs_and_prints_what_the_page_shows(path, namespace):
    text = path.read_text(encoding="utf-8")
    for extra, package in (("langchain", "langchain_kvboost"), ("llama-index", "llama_index.llms.kvboost")):
        if f"from {package} import" in text:
            pytest.importorskip(package, reason=f"pip install 'kvboost-rag[{extra}]'")
    for block in blocks(path):
        printed = run_block(block, namespace)
        if block.shown is not None:
            assert without_times(printed) == without_times(block.shown), f"{path}:{block.line}"


def test_no_block_is_left_out_by_a_slip():
    for path in PAGES:
        fences = re.findall(r"^ *```(\S*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        shell = {"bash"} if path == SERVER else set()
        assert set(fences) <= {"", "python", "text", "{toctree}", "{eval-rst}", "{raw}"} | shell, path
        assert fences.count("python") == len(blocks(path)), path


def test_pages_of_the_site_that_are_committed_are_reached_from_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", index)}
    written = {DOCS / "measured.md", DOCS / "reference" / "command-line.md"}
    assert linked | {DOCS / "index.md"} >= set(PAGES) - written
    assert linked <= set(PAGES) | written


def test_the_picture_is_the_one_that_the_script_draws():
    assert draw_flow.PICTURE.read_text(encoding="utf-8") == draw_flow.draw()
    for kind, letter, _ in draw_flow.KINDS:
        assert f'id="{kind}"' in draw_flow.draw()
        assert f">{letter}</text>" in draw_flow.draw()


def test_the_measured_page_holds_every_result():
    page = generate.measured()
    for path in generate.RESULTS.rglob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        section = page.split(f"\n## {path.relative_to(generate.RESULTS).with_suffix('').as_posix()}\n")[1]
        rows = re.findall(r"^\| (.*?) \| (\S+) ", section.split("\n## ")[0], re.MULTILINE)[1:]
        assert len(rows) == len(result["summary"])
        assert [float(ttft) for _, ttft in rows] == [
            round(row["ttft_ratio"], 2) for row in result["summary"].values()
        ]


def test_the_command_line_page_holds_every_command_and_option():
    page = generate.command_line()
    package = ROOT / "kvboost_rag"
    files = [package / "cli.py", package / "bench" / "options.py", *(package / "commands").glob("*.py")]
    source = "".join(file.read_text() for file in files)
    options = set(re.findall(r'"(--[a-z-]+)"', source))
    assert len(options) > 20
    assert not [option for option in options if option not in page]
    commands = re.findall(r'"([a-z-]+)", \w+\.add_', (package / "cli.py").read_text())
    assert len(commands) == 7
    for command in commands:
        assert f"\n## {command}\n" in page


def test_break_even_by_hand():
    got = answer(CASE)
    assert got.full_ttft == pytest.approx(5.0)
    assert got.reuse_ttft == pytest.approx(1.0)
    # 160 tokens at 160 a second; a prompt saves 4 s, .8 s for each document.
    assert got.index_seconds == pytest.approx(10_000 * 1.0)
    assert got.uses == pytest.approx(1.25)
    assert got.days == pytest.approx(5.0)
    assert got.kv_bytes_a_token == 46_080
    assert got.kv_gib == pytest.approx(10_000 * 160 * 46_080 / 2**30)
    full = replace(CASE, document_tokens=200)
    assert answer(full).uses == pytest.approx(1 / (0.8 * (1 - 0.2)))
    assert answer(replace(CASE, ttft_ratio=1.0)).uses == float("inf")


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium")
def test_the_calculator_in_a_browser_says_what_the_formula_says(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(calculator(CASE), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = dict(re.findall(r'<output id="(\w+)">([^<]+)</output>', done.stdout))
    expected = {name: f"{value:.4g}" for name, value in asdict(answer(CASE)).items()}
    assert {name: float(text) for name, text in shown.items()} == {n: float(t) for n, t in expected.items()}


def test_every_input_of_the_calculator_has_a_label():
    html = calculator(CASE)
    labelled = re.findall(r"<label>[^<]+<input name=\"(\w+)\"", html)
    assert sorted(labelled) == sorted(asdict(CASE))
    assert html.count("<input") == len(labelled)
    assert "http" not in html
