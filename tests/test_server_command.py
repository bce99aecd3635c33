"""``kvboost-rag serve``: what its options become, and what it refuses before a model is loaded."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

from tiny import tiny_model, tiny_tokenizer  # noqa: E402

from kvboost_rag import Document  # noqa: E402
from kvboost_rag.cli import _parser, main  # noqa: E402
from kvboost_rag.commands import serve  # noqa: E402
from kvboost_rag.errors import EngineClosedError  # noqa: E402
from kvboost_rag.server import Engines, Keys, Limits, taken_place  # noqa: E402

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
        (["--port", "70000"], "there is no port 70000; give a --port from 1 to 65535"),
        (["--port", "-1"], "there is no port -1"),
        (["--port", "-1", "--replicas", "1"], "there is no port -1"),
        (["--host", "nosuch.invalid", "--allow-anyone"], "the host 'nosuch.invalid' is not known"),
        (["--host", "192.0.2.1", "--allow-anyone"], "192.0.2.1 is no address of this machine; give another --host"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(serve.KEYS_VARIABLE, raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "right.jsonl").write_text('{"id": "a", "text": "One."}\n')
    (tmp_path / "wrong.jsonl").write_text('{"id": "a", "text": "One."}\n{"id": "b"}\n')
    assert main(["serve", "--port", "0", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("others", [[], ["--replicas", "1"]])
def test_a_port_in_use_is_told_before_a_model_is_looked_for(others, capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert main(["serve", "--model", "nobody/nothing", "--port", str(port), *others]) == 1
    told = f"kvboost-rag: port {port} of 127.0.0.1 is in use; give another --port\n"
    assert capsys.readouterr().err == told


def test_a_place_that_is_taken_refuses_connections_until_it_is_listened_at():
    with taken_place("127.0.0.1", 0) as place:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", place.port))
        place.listen()
        socket.create_connection(("127.0.0.1", place.port)).close()
        # Two may take a port, and one listens.
        with pytest.raises(OSError, match=f"port {place.port} of 127.0.0.1 is in use; give another --port"):
            taken_place("127.0.0.1", place.port).__enter__()
    with taken_place("127.0.0.1", 0) as first, taken_place("127.0.0.1", first.port) as second:
        first.listen()
        with pytest.raises(OSError, match="is in use; give another --port"):
            second.listen()


def test_the_folder_of_namespaces_is_not_told_to_be_empty(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    keys = Keys.parse(f"red:{KEY}1 blue:{KEY}2 green:{KEY}3")
    engines = Engines(tiny_model("llama"), tiny_tokenizer(), "tiny", keys.namespaces, {"cache_dir": tmp_path})
    for name in ("red", "blue"):
        engines[name].add_documents([Document("a", "The first text.")])
    engines.close()
    for options in ([], ["--verify"], ["--prune"]):
        assert main(["inspect", str(tmp_path), *options]) == 1
        assert f"for each namespace (blue, red); name one, as {tmp_path / 'blue'}" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "blue"), "--verify"]) == 0
    assert "1 documents" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "empty")]) == 0


def test_an_engine_that_fails_to_close_leaves_no_other_one_open(monkeypatch):
    engines = Engines(tiny_model("llama"), tiny_tokenizer(), "tiny", ("red", "blue", "green"))

    def fail():
        raise OSError("the disk is full")

    # Whatever the order is, one comes after it.
    monkeypatch.setattr(engines["blue"], "close", fail)
    with pytest.raises(OSError, match="the disk is full"):
        engines.close()
    for name in ("red", "green"):
        with pytest.raises(EngineClosedError):
            engines[name].add_documents([Document("a", "The first text.")])
