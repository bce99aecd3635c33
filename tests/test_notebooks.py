"""The notebooks run from top to bottom, and what is committed shows what a reader should see."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

for name in ("nbclient", "ipykernel", "ipywidgets", "matplotlib", "langchain_huggingface", "langchain_kvboost"):
    pytest.importorskip(name, reason="the notebooks need more packages: pip install 'kvboost-rag[notebooks]'")
pytest.importorskip("llama_index.llms.kvboost", reason="pip install 'kvboost-rag[llama-index]'")
import nbformat  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
from execute import complaints, execute, shows_something  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ("01_quickstart", "02_langchain", "03_llamaindex", "04_speed_and_quality", "05_inside", "06_cache")
PICTURES = {"01_quickstart": 1, "03_llamaindex": 1, "04_speed_and_quality": 3, "05_inside": 4, "06_cache": 1}


def pictures(notebook):
    return sum("image/png" in o.get("data", {}) for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


def test_there_are_six():
    assert [path.stem for path in NOTEBOOKS] == list(NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_those_of_a_clean_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert list(complaints(notebook)) == []
    assert pictures(notebook) == PICTURES.get(path.stem, 0)
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_introduced(path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].source.startswith("# ")
    assert max(len(c.source.splitlines()) for c in cells if c.cell_type == "code") <= 20
    assert sum(c.cell_type == "markdown" for c in cells) >= 0.4 * len(cells)
    links = [link for c in cells if c.cell_type == "markdown" for link in re.findall(r"\]\((.*?\.ipynb)\)", c.source)]
    assert all((path.parent / link).is_file() for link in links)


@pytest.mark.real
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, smollm2):
    before = path.read_bytes()
    notebook = execute(path)
    assert list(complaints(notebook)) == []
    assert pictures(notebook) == PICTURES.get(path.stem, 0)
    assert path.read_bytes() == before


def test_what_a_reader_should_not_see_is_complained_of():
    def cell(source, *outputs, count=1):
        return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=count)

    def stream(text, name="stdout"):
        return nbformat.v4.new_output("stream", name=name, text=text)

    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    wrong = {
        "was not run": cell("x = 1", count=None),
        "shows nothing": cell("x = 1\nx"),
        "raised ValueError": cell("x = 1", error),
        "writes to stderr": cell("x = 1", stream("careful", "stderr")),
        "prints nothing": cell("print()", stream("\n")),
        "a path of the machine": cell("print(p)", stream("/home/somebody/x")),
    }
    for words, bad in wrong.items():
        found = list(complaints(nbformat.v4.new_notebook(cells=[bad])))
        assert len(found) == 1, found
        assert words in found[0]
    good = nbformat.v4.new_notebook(cells=[cell("x = 1"), cell("print(x)", stream("1"), count=2)])
    assert list(complaints(good)) == []
    assert not shows_something("x = 1\ny = f(x);")
    assert not shows_something("f(1);")
    assert shows_something("for x in (1, 2):\n    print(x)")
