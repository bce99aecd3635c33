from __future__ import annotations

import logging
from importlib.resources import files

import pytest

from kvboost_rag.demo import DEMO_DOCUMENTS_A_PROMPT
from kvboost_rag.demo_documents import demo_documents, demo_questions, read_folder
from kvboost_rag.embedding import Embedder
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.layouts import COMPLETION
from kvboost_rag.retrieval import FaissRetriever


def write(folder, **texts):
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")


# The data of the package


def test_demo_documents():
    documents = demo_documents()
    assert len(documents) == len({d.id for d in documents}) == len({d.text for d in documents}) == 40
    assert len({d.metadata["title"] for d in documents}) == 8
    assert all(100 < len(d.text) < 2000 for d in documents)


def test_demo_questions():
    texts = {d.id: d.text for d in demo_documents()}
    questions = demo_questions()
    assert len({q.question for q in questions}) == len(questions) >= 12
    for question in questions:
        assert question.answers
        assert any(answer in texts[question.document_id] for answer in question.answers)


def test_licence_ships_with_the_data():
    text = (files("kvboost_rag") / "demo_data.LICENSE.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in text
    assert "Artetxe" in text


@pytest.mark.real
@pytest.mark.parametrize("reuse", [True, False])
def test_real_model_answers_a_demo_question(smollm2, reuse):
    question = demo_questions()[0]
    retriever = FaissRetriever(demo_documents(), Embedder())
    found = [document for document, _ in retriever.retrieve(question.question, DEMO_DOCUMENTS_A_PROMPT)][::-1]
    with KVBoostEngine(*smollm2, layout=COMPLETION) as engine:
        engine.add_documents(found)
        result = engine.generate(
            question.question, documents=found, max_tokens=8, temperature=0.0, stop="\n", reuse=reuse
        )
    assert any(gold in result.text for gold in question.answers), result.text


# Folders


def test_order_ids_and_texts(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, b_txt="beta\n", a_MD="alpha", z_py="print(1)")
    write(tmp_path / "sub", c_rst="\ufeffgamma\r\n\r\nsecond")
    assert [(d.id, d.text) for d in read_folder(tmp_path)] == [
        ("a.MD", "alpha"),
        ("b.txt", "beta"),
        ("sub/c.rst", "gamma\n\nsecond"),
        ("z.py", "print(1)"),
    ]


def test_long_file_is_cut_at_paragraphs(tmp_path):
    paragraphs = [f"{i}\n" + "word " * 99 + "end." for i in range(5)]
    write(tmp_path, long_txt="\n\n".join(paragraphs[:2]) + "\n \n\n" + "\n\n".join(paragraphs[2:]) + "\n")
    documents = read_folder(str(tmp_path))
    assert [d.id for d in documents] == ["long.txt#1", "long.txt#2", "long.txt#3"]
    assert [d.text for d in documents] == [
        "\n\n".join(paragraphs[:2]),
        "\n\n".join(paragraphs[2:4]),
        paragraphs[4],
    ]


@pytest.mark.parametrize(
    ("unit", "end"),
    [("a line of code here\n", "here"), ("One sentence. ", "sentence."), ("number ", "number"), ("x", "x")],
)
def test_long_paragraph_is_cut_at_the_best_border(tmp_path, unit, end):
    text = unit * (3000 // len(unit))
    write(tmp_path, one_txt=text)
    documents = read_folder(tmp_path)
    assert len(documents) == 3
    assert all(500 <= len(d.text) <= 1200 for d in documents)
    assert all(d.text.endswith(end) for d in documents)
    assert "".join("".join(d.text for d in documents).split()) == "".join(text.split())


def test_passages_lose_nothing_but_white_space(tmp_path):
    text = "".join(d.text + ("\n\n" if i % 3 else " ") for i, d in enumerate(demo_documents()))
    write(tmp_path, all_md=text)
    documents = read_folder(tmp_path)
    assert max(len(d.text) for d in documents) <= 1200
    assert "".join(" ".join(d.text for d in documents).split()) == "".join(text.split())
    assert all(d.text in text for d in documents)


def test_what_is_left_out_is_logged(tmp_path, caplog):
    write(tmp_path, a_txt="text", empty_txt=" \n", picture_png="x")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git", config_txt="hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        assert [d.id for d in read_folder(tmp_path)] == ["a.txt"]
    assert caplog.messages[0].endswith(": .git, empty.txt, loop, picture.png")


def test_long_list_of_left_out_files_is_shortened(tmp_path, caplog):
    write(tmp_path, a_txt="text", **{f"f{i:02}_png": "" for i in range(25)})
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        read_folder(tmp_path)
    assert caplog.messages[0].endswith("f19.png and 5 more")


def test_file_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 3\); convert it"):
        read_folder(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text to read; put files such as"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "gone")
