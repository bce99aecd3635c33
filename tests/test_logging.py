"""What the library says while it works: to the log in words, on a terminal with bars, and nowhere else."""

from __future__ import annotations

import ast
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

import kvboost_rag
from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.progress import progress

PACKAGE = Path(kvboost_rag.__file__).parent
FILES = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "integrations").rglob("*.py")]
DOCUMENTS = [Document(f"doc {i}", f"Document {i} is long enough to be located in a text.") for i in range(3)]


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield path, node


def test_every_logger_is_under_the_librarys_name():
    named = [(path, call.args[0]) for path, call in calls("logging.getLogger")]
    # Not ours, and nothing is written to it: the command that starts replicas sets its level.
    named = [(path, name) for path, name in named if ast.unparse(name) != "'ray.serve'"]
    assert len(named) >= 20
    for path, name in named:
        text = name.value if isinstance(name, ast.Constant) else None
        # __name__ is right inside the package; the integrations' packages have other names.
        own = isinstance(name, ast.Name) and name.id == "__name__" and PACKAGE in path.parents
        assert own or (text is not None and text.split(".")[0] == "kvboost_rag"), path


def test_nothing_is_printed_but_by_the_command_line():
    printing = {path.relative_to(PACKAGE).parts[0] for path, _ in calls("print")}
    assert printing <= {"cli.py", "commands"}


@pytest.mark.parametrize("level", ["warning", "error", "exception"])
def test_warnings_are_sentences_and_no_codes(level):
    for path, call in calls(f"logger.{level}"):
        message = ast.unparse(call.args[0])
        if isinstance(call.args[0], ast.Constant):
            words = re.findall(r"[a-z]{2,}", re.sub(r"%\S", "", call.args[0].value))
            assert len(words) >= 3, (path, message)
            assert not call.args[0].value.startswith("chunk %s"), (path, message)


def test_an_application_that_configures_nothing_hears_nothing(capsys):
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("kvboost_rag").handlers)
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        engine.add_documents(DOCUMENTS)
        engine.generate("Why?", documents=DOCUMENTS, max_tokens=2)
    assert capsys.readouterr() == ("", "")


def test_a_person_can_follow_what_the_engine_does(caplog):
    caplog.set_level(logging.INFO, "kvboost_rag")
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_memory_bytes=9, refill=False) as engine:
        engine.add_documents(DOCUMENTS)
        engine.generate("Why?", documents=DOCUMENTS, max_tokens=2)
    ready, *refused, indexed, asked = (record.getMessage() for record in caplog.records)
    assert ready.startswith("engine ready: reuse on, repair auto:standard = ")
    assert len(refused) == 3
    assert re.fullmatch(r"a chunk of document 'doc 0' takes \d+ bytes, .* budget of 9; .* larger one", refused[0])
    assert re.fullmatch(r"3 of 3 documents indexed, \d+ tokens, in \d+\.\d s", indexed)
    assert re.match(r"\d+ prompt tokens: \d+ exact, .* \| TTFT \d+ ms, total \d+ ms", asked)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("show", "terminal", "drawn"), [
    (True, False, True), (False, True, False), (None, True, True), (None, False, False),
])  # fmt: skip
def test_bars_are_drawn_where_they_are_wanted(monkeypatch, show, terminal, drawn):
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert list(progress(range(3), "measuring", "sample", show)) == [0, 1, 2]
    assert ("measuring" in out.getvalue() and "3/3" in out.getvalue()) is drawn


def test_ingest_draws_a_bar_when_it_is_asked_to(capsys):
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        engine.add_documents(DOCUMENTS, show_progress=True)
    err = capsys.readouterr().err
    assert "indexing" in err
    assert "3/3" in err
