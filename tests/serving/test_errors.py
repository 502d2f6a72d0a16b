"""Errors: each kind has its status, all have the same fields, and they say how to correct common mistakes."""

import gzip
import json
import re
from pathlib import Path

import pytest
from starlette.types import Message

import facts
from bertserve.service.api.application import Application
from bertserve.service.api.error_responses import error_response
from bertserve.service.body.json_text import to_json
from bertserve.service.errors import BertServeError, RefusedError
from bertserve.service.tasks.catalog import TASKS
from support.app_client import Send, call, error_of, post, posting, state_of

ERRORS = facts.errors()


def test_every_error_of_a_request_has_its_own_type() -> None:
    assert len({error.error_type for error in ERRORS} - {BertServeError.error_type}) == len(ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.error_type)
def test_every_error_response_has_the_same_fields(error: BertServeError) -> None:
    answer = error_response(error, "r-1")
    assert json.loads(answer.body) == {"error": error.message, "error_type": error.error_type, "request_id": "r-1"}
    assert answer.status_code == error.status
    assert to_json(json.loads(answer.body)) == answer.body  # the same style as other answers


def test_a_refusal_has_a_retry_after_header() -> None:
    waits = {seconds: RefusedError("full", reason="queue_full", retry_after_s=seconds) for seconds in (0.0, 0.3, 1.2, 60.0)}
    assert [error_response(error, "r").headers["retry-after"] for error in waits.values()] == ["1", "1", "2", "60"]


@pytest.mark.parametrize("name", ["\n", "\r\nSet-Cookie: a=b", "\u202egood", "\ud800", "\x1b[2J", "good\0", "e\u0301 \u4e2d"])
@pytest.mark.parametrize("body", ['{"inputs": "good", "parameters": {%s: 1}}', '{"inputs": "good", "parameters": %s}'])
def test_an_error_has_no_control_characters_from_the_request(models: Path, name: str, body: str) -> None:
    answer = call(models, "POST", "/classify", content=(body % json.dumps(name)).encode())
    assert error_of(answer, *((400, "malformed") if name == "\ud800" else (422, "invalid_value"))).isprintable()


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [("GET", "/classify", {"POST"}), ("POST", "/models", {"GET"}), ("DELETE", "/models/tiny", {"GET", "POST"})],
)
def test_a_wrong_method_gets_the_allowed_methods(models: Path, method: str, path: str, methods: set[str]) -> None:
    answer = call(models, method, path)
    error_of(answer, 405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == methods


async def test_a_status_is_counted_only_when_it_is_sent(models: Path) -> None:
    """If the server cannot send the response head, the caller gets a 500, and the 500 is counted."""
    state = state_of(models)
    messages: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            raise ValueError("no header")
        messages.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"inputs": []}'}

    await Application(state)(posting(), receive, send)
    assert [message.get("status") for message in messages] == [500, None]
    page = state.metrics.render().decode()
    assert 'requests_total{model="tiny",status="500",task="text-classification"} 1.0' in page
    assert 'status="200"' not in page


@pytest.mark.parametrize(
    ("raw", "place"),
    [(b'{"inputs": {"a": 1}, "b": {', "at column 27;"), (b"good", "at column 1;"), (b'{"inputs": "a"}\n]', "at line 2 column 1;")],
)
def test_the_error_for_invalid_json_has_the_place_and_the_example_of_openapi(api: Send, raw: bytes, place: str) -> None:
    """tests/serving/test_operations.py sends the examples of OpenAPI, so they are valid."""
    for path, task in (("/classify", "text-classification"), ("/models/passages", "question-answering")):
        message = error_of(api("POST", path, content=raw), 400, "malformed")
        assert place in message
        example = json.loads(message.partition("such as ")[2].removesuffix("."))
        assert TASKS[task].body.model_json_schema()["examples"] == [example]


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"inputs": "a"}\n{"inputs": "b"}\n', "application/x-ndjson"),
        (b"inputs=good", "form"),
        (b'--1\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ngood\r\n--1--', "form"),
        (gzip.compress(b"{}", mtime=0), "gzip"),
        ("{}".encode("utf-16"), "UTF-16"),
        ("{}".encode("utf-16-be"), "UTF-16"),
    ],
)
def test_the_error_for_another_format_names_it(api: Send, raw: bytes, name: str) -> None:
    assert name in error_of(api("POST", "/classify", content=raw), 400, "malformed")


@pytest.mark.parametrize(
    ("body", "path", "pattern"),
    [
        ("good", "/classify", 'text.*`inputs`.*{"inputs": "A warm'),
        (["good"], "/classify", "list.*`inputs`"),
        (None, "/classify", "null.*`inputs`"),
        (5, "/answer", 'number.*`inputs`.*{"inputs": {"question": '),
        (["good"], "/models/passages", 'list.*`inputs`.*{"inputs": {"question": '),
        (["good"], "/rerank", 'list.*`query`, `texts`.*{"query": '),
    ],
)
def test_the_error_for_bare_inputs_shows_a_complete_body(api: Send, body: object, path: str, pattern: str) -> None:
    assert re.search(pattern, error_of(post(api, body, path=path), 422, "invalid_value"))


def test_the_error_for_an_unknown_path_lists_paths(api: Send) -> None:
    message = error_of(api("POST", f"/{'generate' * 500}"), 404, "not_found")
    assert " /classify, /ner, /answer, " in message
    assert len(message) < 300


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/classify", "/v1/embeddings", "/models/names", "/health"])
def test_the_error_for_a_slash_at_the_end_says_how_a_path_ends(api: Send, method: str, path: str) -> None:
    for slashes in ("/", "//"):
        response = api(method, path + slashes)
        assert response.status_code == 404
        assert "slash" in response.text


@pytest.mark.parametrize("path", ["/classify", "/models/classifier", "/attention"])
@pytest.mark.parametrize("inputs", [[["good", "bad"]], ["good", ["good", "bad"]]])
def test_the_error_for_a_pair_in_a_list_shows_a_pair(api: Send, path: str, inputs: list[object]) -> None:
    message = error_of(
        post(api, {"inputs": inputs, "parameters": {"output_attentions": True} if "att" in path else {}}, path=path), 422, "invalid_value"
    )
    pair = json.loads(re.findall(r"\{.*\}", message)[0])
    assert post(api, {"inputs": [pair]}, path="/classify").status_code == 200


@pytest.mark.parametrize("path", ["/answer", "/choose", "/similarity"])
@pytest.mark.parametrize("inputs", [[["good", "bad"]], ["good", "bad"]])
def test_the_error_for_a_list_in_place_of_an_object_shows_an_object(api: Send, path: str, inputs: list[object]) -> None:
    message = error_of(post(api, {"inputs": inputs}, path=path), 422, "invalid_value")
    item = json.loads(re.findall(r"\{.*\}", message)[0])
    assert "must be" not in post(api, {"inputs": item}, path=path).text  # the question is too long for this model
