"""The server against those who mean ill or are mistaken: whatever they send, an error that says what, and no more."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

pytest.importorskip("fastapi", reason="the server needs more packages: pip install 'kvboost-rag[serve]'")

from live_server import BLUE, KEYS, OPERATOR, RED, ZEBRA, added, eventually, live_server, own_engine  # noqa: E402

from kvboost_rag.inspection import inspect_folder  # noqa: E402
from kvboost_rag.server import Keys, Limits, check_host  # noqa: E402

CHAT = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "What ran?"}], "temperature": 0, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LIMITS = Limits(
    max_body_bytes=20_000, max_tokens=64, max_prompt_tokens=600, max_documents=3, max_batch_documents=4,
    max_known_documents=5,
)  # fmt: skip
PATHS = [
    ("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/v1/documents"), ("GET", "/v1/documents"),
    ("GET", "/v1/documents/zebra"), ("DELETE", "/v1/documents/zebra"), ("GET", "/v1/models"), ("GET", "/metrics"),
]  # fmt: skip


@pytest.fixture(scope="module")
def live():
    with live_server(KEYS, LIMITS) as running:
        added(running, RED)
        yield running


@pytest.fixture(scope="module")
def red(live):
    with live.client(RED) as client:
        yield client


@pytest.fixture(scope="module")
def blue(live):
    with live.client(BLUE) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_runs_afterwards(live):
    yield
    assert live.idle()


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Keys ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", f"Bearer {RED}x", f"Bearer {RED[:-1]}", f"Basic {RED}", RED])
def test_no_door_opens_without_a_right_key(live, header):
    with live.client() as client:
        for method, path in PATHS:
            headers = {} if header is None else {"Authorization": header}
            body = None if method != "POST" else ASKED if path == CHAT else {"id": "x", "text": "x"}
            response = client.request(method, path, json=body, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").json() == {"status": "ok"}


def test_the_operators_key_reads_the_metrics_and_nothing_else_does(live, red):
    with live.client(OPERATOR) as operator:
        assert "kvboost_hit_rate" in operator.get("/metrics").text
        assert error_of(operator.get("/v1/documents"), 403)["code"] == "wrong_kind_of_key"
        assert error_of(operator.post(CHAT, json=ASKED), 403)
    assert error_of(red.get("/metrics"), 403)


def test_a_namespace_sees_nothing_of_another(live, red, blue):
    absent = error_of(blue.post(CHAT, json=ASKED | {"documents": ["never-added"]}), 400)
    present = error_of(blue.post(CHAT, json=ASKED | {"documents": ["zebra"]}), 400)
    assert present == {**absent, "message": absent["message"].replace("never-added", "zebra")}
    assert blue.get("/v1/documents").json()["data"] == []
    assert error_of(blue.get("/v1/documents/zebra"), 404)["code"] == "document_not_found"
    assert error_of(blue.delete("/v1/documents/zebra"), 404)
    located = blue.post(CHAT, json=ASKED | {"messages": [{"role": "user", "content": f"Read {ZEBRA}"}]}).json()
    assert located["kvboost"]["documents"] == {}
    stats = live.service.engines["blue"].stats
    assert stats.documents == stats.store_bytes == 0
    assert red.get("/v1/documents/zebra").json()["text"] == ZEBRA


def test_each_namespace_gets_its_own_engines_answer(red, blue):
    text = "Another animal altogether, in the same place: the lion lay in the grass and waited."
    blue.post("/v1/documents", json={"id": "zebra", "text": text}).raise_for_status()
    asked = ASKED | {"documents": ["zebra"]}
    with own_engine("red") as engine:
        expected = engine.generate(ASKED["messages"], documents=["zebra"], temperature=0, max_tokens=8).text
    assert red.post(CHAT, json=asked).json()["choices"][0]["message"]["content"] == expected
    assert blue.post(CHAT, json=asked).json()["usage"]["prompt_tokens"] != red.post(CHAT, json=asked).json()["usage"]
    assert blue.delete("/v1/documents/zebra").status_code == 200


def test_each_namespace_keeps_its_files_in_a_folder_of_its_own(tmp_path):
    with live_server(KEYS, cache_dir=tmp_path) as live:
        added(live, RED)
    assert {d.document_id for d in inspect_folder(tmp_path / "red")} == {"zebra", "music", "rain"}
    assert inspect_folder(tmp_path / "blue") == []
    assert {path.name for path in tmp_path.iterdir()} == {"red", "blue"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no API keys"),
        ("# red:0123456789abcdef", "no API keys"),
        (f"*:{OPERATOR}", "no API keys"),
        ("just-a-key-0123456789", "entry 1 of the API keys is not namespace:key"),
        ("../red:0123456789abcdef", "not namespace:key"),
        ("red:short", "less than 16 characters"),
        ("red:0123456789abcdéf", "printable ASCII"),
        ("red:0123456789abcdef blue:0123456789abcdef", "comes twice"),
    ],
)
def test_keys_that_can_not_be_used_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        Keys.parse(text)
    assert "just-a-key" not in str(caught.value) and "0123456789abcdef" not in str(caught.value)


def test_another_machine_is_served_with_keys_alone():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_host(host, Keys())
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ValueError, match="give --api-keys"):
            check_host(host, Keys())
        check_host(host, KEYS)
        check_host(host, Keys(), allow_anyone=True)


def test_without_keys_a_page_with_this_machines_address_gets_nothing():
    with live_server() as live, live.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400
        refused = client.post(CHAT, content=json.dumps(ASKED), headers={"Content-Type": "text/plain"})
        assert error_of(refused, 400)


# Bodies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"logprobs": True}, "logprobs", "unsupported_value"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_value"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value"),
        ({"functions": []}, "functions", "unsupported_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "unsupported_value"),
        ({"max_completion_tokens": 9}, "max_tokens", "unsupported_value"),
        ({"max_tokens": 65}, "max_tokens", "max_tokens_out_of_range"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens_out_of_range"),
        ({"max_tokens": "8"}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, None, "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"model": "gpt-9"}, "model", "model_not_found"),
        ({"model": None}, "model", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, None, "invalid_value"),
        ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages[0].mood", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "invalid_value"),
        ({"documents": ["zebra"] * 4}, "documents", "too_many_documents"),
        ({"documents": [{"id": "a", "text": "  "}]}, "documents[0].text", "invalid_value"),
        ({"documents": [{"id": "", "text": "x"}]}, "documents[0].id", "invalid_value"),
        ({"documents": [{"id": "a", "text": "\ud800 text"}]}, "documents[0].text", "invalid_value"),
        ({"documents": [{"id": str(i), "text": f"{i} of three texts."} for i in range(3)]}, "documents",
         "too_many_documents"),
        ({"repair": "magic"}, None, "invalid_value"),
        ({"quality": "best", "repair": "none"}, None, "invalid_value"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a", "invalid_value"),
        ({"chat_template_kwargs": {"a": {"b": {"c": 1}}}}, "chat_template_kwargs.a", "invalid_value"),
        ({"": 1}, "", "unknown_parameter"),
        ({"k" * 5000: 1}, "k" * 200, "unknown_parameter"),
        ({"stop": ["", "a"]}, "stop[0]", "invalid_value"),
        ({"seed": 1 << 70}, None, "invalid_value"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"tool_choice": "required"}, None, "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "unsupported_value"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         None, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, None, "prompt_too_long"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_never_passed_over(red, change, param, code):
    # httpx writes no lone surrogates.
    content = json.dumps(ASKED | change).encode()
    error = error_of(red.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 404 if (
        code == "model_not_found"
    ) else 400)
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["param"] == param
    assert len(error["message"]) < 400


def test_tools_with_a_form_name_what_to_do(red):
    asked = ASKED | {"tools": [TOOL], "response_format": {"type": "json_object"}}
    assert "tool_choice='none'" in error_of(red.post(CHAT, json=asked), 400)["message"]
    assert red.post(CHAT, json=asked | {"tool_choice": "none"}).status_code == 200
    assert red.post(CHAT, json=asked | {"response_format": {"type": "text"}}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "messages", "documents", "tools", "tokenize", "add_generation_prompt", "return_tensors", "padding",
        "chat_template", "continue_final_message", "conversation", "conversations", "kwargs", "self",
        "tokenizer_kwargs", "return_assistant_tokens_mask", "truncation",
    ],
)  # fmt: skip
def test_what_makes_the_prompt_is_no_option_of_the_template(red, name):
    error = error_of(red.post(CHAT, json=ASKED | {"chat_template_kwargs": {name: None}}), 400)
    assert error["param"] == "chat_template_kwargs" and f"can not set {name}" in error["message"]


@pytest.mark.parametrize("name", ["", "a b", "\u00e4", "__class__", "environment", "loop", "caller", "bos_token"])
def test_any_other_name_is_passed_on_to_the_template(red, name):
    asked = ASKED | {"chat_template_kwargs": {name: "x"}}
    assert red.post(CHAT, json=asked).json()["choices"] == red.post(CHAT, json=ASKED).json()["choices"]


def test_a_template_that_stumbles_over_an_option_says_so(live, red, monkeypatch):
    tokenizer = live.service.engines["red"].tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{{ 1 + (depth or 0) }}{{ range(5) }}")
    asked = ASKED | {"chat_template_kwargs": {"depth": "deep"}}
    assert "unsupported operand" in error_of(red.post(CHAT, json=asked), 400)["message"]
    asked = ASKED | {"chat_template_kwargs": {"range": "far"}}
    assert "not callable" in error_of(red.post(CHAT, json=asked), 400)["message"]
    assert red.post(CHAT, json=ASKED | {"chat_template_kwargs": {"depth": 3}}).status_code == 200


def test_a_call_keeps_the_index_that_it_had_in_a_stream(red):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]}]
    plain = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    answers = [red.post(CHAT, json=ASKED | {"messages": m}).json()["choices"] for m in (said, plain)]
    assert answers[0] == answers[1]


def test_what_changes_nothing_is_taken(red):
    idle = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x", "n": 1,
        "logprobs": False, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "seed": 1, "stop": None,
        "top_logprobs": None, "modalities": ["text"], "parallel_tool_calls": True, "prompt_cache_key": "k",
    }  # fmt: skip
    assert red.post(CHAT, json=ASKED | idle).json()["choices"] == red.post(CHAT, json=ASKED).json()["choices"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe\x00", b'{"model": "\xff"}', b"[" * 9_000 + b"]" * 9_000,
        b'{"model":' * 1_500 + b"1" + b"}" * 1_500, b"NaN", b'{"model": "tiny", "messages": NaN}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_an_error(red, content):
    for path in (CHAT, "/v1/completions", "/v1/documents"):
        error_of(red.post(path, content=content, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_type_is_told_the_right_one(red, kind):
    """As curl sends it when nobody says what it is."""
    headers = {} if kind is None else {"Content-Type": kind}
    error = error_of(red.post(CHAT, content=json.dumps(ASKED), headers=headers), 400)
    assert error["code"] == "invalid_json" and "Content-Type: application/json" in error["message"]


def test_a_compressed_body_is_told_what_to_do(red):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    error = error_of(red.post(CHAT, content=gzip.compress(json.dumps(ASKED).encode()), headers=headers), 400)
    assert error["code"] == "invalid_json" and "not compressed" in error["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001"])
def test_a_wrong_page_is_named(red, query):
    assert error_of(red.get(f"/v1/documents?{query}"), 400)["param"] == "limit"


def test_a_deep_schema_is_refused_or_followed(red):
    schema = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    assert red.post(CHAT, json=ASKED | {"response_format": form}).status_code in (200, 400)


def test_too_large_a_body_is_broken_off_however_it_comes(live, red):
    body = json.dumps(ASKED | {"user": "x" * 30_000}).encode()
    json_type = {"Content-Type": "application/json"}
    assert error_of(red.post(CHAT, content=body, headers=json_type), 413)["code"] == "request_too_large"
    chunks = (body[i : i + 1000] for i in range(0, len(body), 1000))
    assert error_of(red.post(CHAT, content=chunks, headers=json_type), 413)


def test_a_batch_is_checked_before_any_of_it_is_added(red):
    known = len(red.get("/v1/documents").json()["data"])
    texts = [{"id": f"new-{i}", "text": f"The text number {i} of them."} for i in range(5)]
    assert error_of(red.post("/v1/documents", json={"documents": texts}), 400)["code"] == "too_many_documents"
    assert error_of(red.post("/v1/documents", json={"documents": texts[:3]}), 400)["code"] == "too_many_documents"
    assert "comes twice" in error_of(red.post("/v1/documents", json={"documents": [texts[0]] * 2}), 400)["message"]
    assert error_of(red.post("/v1/documents", json={"id": "x"}), 400)["param"] == "text"
    assert error_of(red.post("/v1/documents", json={"id": "x", "text": "y" * 2000}), 400)["code"] == (
        "context_length_exceeded"
    )
    assert len(red.get("/v1/documents").json()["data"]) == known


# Ids and headers -----------------------------------------------------------------------------------------------------


def raw(live, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(request)
        out = b""
        while part := connection.recv(65536):
            out += part
        return out


@pytest.mark.parametrize("told", ['"metadata": {"x": NaN}', '"version": "\\ud800"', '"metadata": {"\\udfff": 1}'])
def test_what_no_list_could_hold_is_not_kept(red, told):
    body = f'{{"id": "odd", "text": "A zebra is striped.", {told}}}'.encode()
    error_of(red.post("/v1/documents", content=body, headers={"Content-Type": "application/json"}), 400)
    assert "odd" not in [d["id"] for d in red.get("/v1/documents").json()["data"]]


def test_nobody_without_a_key_reads_the_schema(live):
    with live.client() as client, live.client(RED) as red:
        assert client.get("/openapi.json").status_code == 401
        assert "ask /v1/chat/completions" in error_of(red.get("/openapi.json"), 404)["message"]


@pytest.mark.parametrize("arguments", ["[" * 5000 + "]" * 5000, "{", "3"])
def test_arguments_of_earlier_calls_are_json(red, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    said = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = error_of(red.post(CHAT, json={**ASKED, "messages": said}), 400)
    assert error["param"] == "messages[1].tool_calls"


@pytest.mark.parametrize(
    "document_id", ["../../../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..\\..\\x", "%00", "%ff", "a%0d%0ab"]
)
def test_an_id_is_no_path_and_no_header(live, document_id):
    for method in (b"GET", b"DELETE"):
        out = raw(
            live, method + f" /v1/documents/{document_id} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Authorization: Bearer {RED}\r\n\r\n".encode()
        )  # fmt: skip
        head, _, body = out.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        assert json.loads(body)["error"]["code"].endswith("not_found")
        assert b"root:" not in out and b"\r\nb" not in head


def test_a_document_may_be_called_what_it_likes(red):
    name = "../../x: 1; <script>"
    added = red.post("/v1/documents", json={"id": name, "text": "A text under a strange name."})
    assert added.json()["id"] == name
    answer = red.post(CHAT, json=ASKED | {"documents": [name]})
    assert list(answer.json()["kvboost"]["documents"]) == [name]
    assert red.delete("/v1/documents/..%2F..%2Fx:%201;%20%3Cscript%3E").json()["deleted"]
    error_of(red.post("/v1/documents", json={"id": "x\r\nX-Evil: 1", "text": "A text."}), 400)


def test_a_request_that_is_no_http_is_refused(live):
    bearer = f"Authorization: Bearer {RED}\r\n".encode()
    assert raw(live, b"GARBAGE\r\n\r\n").startswith(b"HTTP/1.1 400")
    smuggled = b"POST /v1/documents HTTP/1.1\r\nHost: x\r\n" + bearer + b"Content-Length: x\r\n\r\n"
    assert raw(live, smuggled).startswith(b"HTTP/1.1 400")


def test_what_failed_inside_is_not_told(live, red, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(live.service.engines["red"], "stream", fail)
    with live.client(RED) as client:
        response = client.post(CHAT, json=ASKED)
    assert error_of(response, 500)["message"] == "the server failed; its log says why"
    # The log is written once the response is sent.
    eventually(lambda: "/secret/path" in caplog.text)


def test_after_all_of_this_a_right_request_gets_its_answer(red):
    answer = red.post(CHAT, json=ASKED | {"documents": ["zebra"]}).json()
    assert answer["kvboost"]["documents"]["zebra"]["computed"] == 0
