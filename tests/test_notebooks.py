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
import execute as checker  # noqa: E402
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


def cell(source, *outputs, count=1):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=count)


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(**data):
    return nbformat.v4.new_output("display_data", data={kind.replace("_", "/"): text for kind, text in data.items()})


WRONG = [
    ("was not run", cell("x = 1", count=None)),
    ("was not run", cell("x = 1", count=2)),
    ("shows nothing", cell("x = 1\nx")),
    ("raised ValueError", cell("x = 1", nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]))),
    ("writes to stderr", cell("x = 1", stream("careful", "stderr"))),
    ("prints nothing", cell("print()", stream("\n"))),
    *(
        ("a path of the machine", cell("print(p)", stream(path)))
        for path in ("/home/somebody/x", "at /root/x", "/tmp/x", "/Users/x/y", "/var/x", "D:\\\\x")
    ),
    ("a path of the machine", cell("p", shown(text_html="<b>/tmp/x</b>"))),
]


@pytest.mark.parametrize(("words", "bad"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_reader_should_not_see_is_complained_of(words, bad):
    found = list(complaints(nbformat.v4.new_notebook(cells=[bad])))
    assert len(found) == 1, found
    assert words in found[0]


def test_what_a_reader_may_see_is_not_complained_of():
    picture = shown(image_png="iVBORw0KGgo/tmp/var/home/x")
    good = [cell("x = 1"), cell("print(x)", stream("1 of 2/3"), count=2), cell("p", picture, count=3)]
    assert list(complaints(nbformat.v4.new_notebook(cells=good))) == []


def test_what_is_to_be_looked_at():
    assert not shows_something("x = 1\ny = f(x);")
    assert not shows_something("f(1);")
    assert shows_something("for x in (1, 2):\n    print(x)")
    assert shows_something("display(x);")


def test_notebooks_are_run_kept_and_counted(monkeypatch, tmp_path, capsys):
    for name, source in (("good", "1 + 1"), ("quiet", "None"), ("other", "None")):
        notebook = nbformat.v4.new_notebook(cells=[cell(source, count=None)], metadata={"language_info": {"name": "x"}})
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(checker, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["execute.py", "good", "quiet"])
    assert checker.main() == 1
    good, other, quiet = (nbformat.read(path, as_version=4) for path in sorted(tmp_path.glob("*.ipynb")))
    assert good.cells[0].outputs[0].data["text/plain"] == "2"
    assert quiet.cells[0].execution_count == 1
    assert other.cells[0].execution_count is None
    assert dict(good.metadata) == {"kernelspec": checker.KERNEL}
    assert "cell 1 shows nothing" in capsys.readouterr().out
