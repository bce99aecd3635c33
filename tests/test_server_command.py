"""``kvboost-rag serve``: what its options become, and what it refuses before a model is loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

from kvboost_rag import Document  # noqa: E402
from kvboost_rag.cli import _parser, main  # noqa: E402
from kvboost_rag.commands import serve  # noqa: E402
from kvboost_rag.server import Limits  # noqa: E402

KEY = "a-key-of-many-letters"


def read(*arguments: str):
    return _parser().parse_args(["serve", *arguments])


def test_the_options_defaults_are_the_limits_own():
    assert serve._limits(read()) == Limits()
    changed = serve._limits(read("--max-queue", "0", "--max-body-bytes", "1MiB", "--timeout", "2.5"))
    assert changed == Limits(max_queue=0, max_body_bytes=1 << 20, timeout=2.5)


def test_keys_come_from_a_file_or_else_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(serve.KEYS_VARIABLE, raising=False)
    assert serve._keys(None).namespaces == ("",)
    monkeypatch.setenv(serve.KEYS_VARIABLE, f"red:{KEY}1 red:{KEY}2 blue:{KEY}3")
    assert serve._keys(None).namespaces == ("red", "blue")
    (tmp_path / "keys").write_text(f"# of the team\n\ngreen:{KEY}4\n")
    keys = serve._keys(tmp_path / "keys")
    assert keys.namespaces == ("green",)
    assert keys.namespace(f"bearer {KEY}4") == "green"
    assert KEY not in repr(keys)


def test_documents_come_from_a_folder_or_from_lines(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.txt").write_text("The first text.")
    assert serve._documents(tmp_path) == [Document("part/one.txt", "The first text.")]
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"id": "a", "text": "A\u2028 line.", "metadata": {"page": 3}}\n\n{"id": "b", "text": "Two."}\n')
    assert serve._documents(lines) == [Document("a", "A\u2028 line.", None, {"page": 3}), Document("b", "Two.")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "give --api-keys"),
        (["--api-keys", "nowhere"], "nowhere"),
        (["--ray-address", "10.0.0.1:6379"], "give --replicas N"),
        (["--replica-gpus", "1"], "--replica-gpus is for replicas; give --replicas N"),
        (["--max-concurrent", "0"], "max_concurrent is 0; give at least 1"),
        (["--timeout", "nan"], "timeout is nan"),
        (["--send-timeout", "0"], "send_timeout is 0.0; give at least"),
        (["--max-waiting-per-key", "0"], "max_waiting_per_key is 0; give at least 1"),
        (["--documents", "nowhere"], "nowhere"),
        (["--documents", "empty"], "empty holds no text"),
        (["--documents", "wrong.jsonl"], 'wrong.jsonl, line 2: text: Field required; write a document as {"id"'),
        (["--documents", "right.jsonl", "--replicas", "1"], "by POST /v1/documents"),
        (["--model", "nobody/nothing"], "nobody/nothing"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(serve.KEYS_VARIABLE, raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "right.jsonl").write_text('{"id": "a", "text": "One."}\n')
    (tmp_path / "wrong.jsonl").write_text('{"id": "a", "text": "One."}\n{"id": "b"}\n')
    assert main(["serve", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
