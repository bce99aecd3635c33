"""The command line as a person meets it."""

from __future__ import annotations

import json

import pytest

from kvboost_rag.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    (folder / "sea.md").write_text("The sea is salt because rivers carry salt to it and only water leaves it.\n")
    (folder / "ink.txt").write_text("Iron gall ink was made of oak galls, vitriol, gum and water for centuries.\n")
    return folder


@pytest.mark.real
def test_demo_answers_real_questions_with_reuse_and_without(smollm2, capsys, tmp_path):
    questions = ["--question", "Who led the Mongols at Baghdad?", "--question", "When was the university founded?"]
    assert main(["demo", "--json", "--cache-dir", str(tmp_path), "--max-tokens", "6", *questions]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["stats"]["documents"] == 40
    for answer in out["answers"]:
        assert len(answer["sources"]) == 2
        assert answer["tokens"]["exact"] > 250
        assert answer["tokens"]["computed"] < 60
        assert answer["ttft_ms"] > 0 < answer["full_prefill_ttft_ms"]
        assert len(answer["strip"]) == 72
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["documents"]
    assert len(listed) == 40
    assert sum(d["tokens"] for d in listed) == out["stats"]["document_tokens"]


@pytest.mark.real
def test_demo_over_a_folder_prints_sources_and_strip(smollm2, capsys, folder, tmp_path):
    arguments = ["--docs", str(folder), "--cache-dir", str(tmp_path), "--max-tokens", "4", "--question", "Why salt?"]
    assert main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 documents" in out
    assert "sources: ink.txt, sea.md (best last)" in out
    assert "sources: sea.md, ink.txt (best first)" in out
    assert "full prefill" in out
    assert "C]" in out
    assert main(["precompute", "--docs", str(folder), "--cache-dir", str(tmp_path)]) == 0
    assert "2 documents" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 0
    assert "ink.txt" in capsys.readouterr().out
    small = ["--docs", str(folder), "--cache-dir", str(tmp_path / "small"), "--max-disk-bytes", "2kB"]
    assert main(["precompute", *small]) == 1
    out = capsys.readouterr()
    assert "0 of them as KV" in out.out
    assert "--max-disk-bytes" in out.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--docs", "nowhere"], "nowhere is not a folder"),
        (["demo", "--model", "nobody/nothing"], "nobody/nothing"),
        (["demo", "--k", "0"], "ask for at least 1"),
        (["demo", "--repair", "magic"], "unknown repair 'magic'"),
        (["inspect", "nowhere"], "nowhere is not a folder"),
        (["bench", "--data", "nowhere.jsonl", "--output", "out.json"], "nowhere.jsonl"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" or captured.out.startswith("loading ")
    assert captured.out.count("\n") <= 1
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_invalid_utf8_names_the_file(tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"good \xff bad")
    assert main(["demo", "--docs", str(tmp_path)]) == 1
    assert "bad.txt is not UTF-8 (byte 5)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--magic"], ["demo", "--k", "many"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err
