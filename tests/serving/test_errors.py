"""One table maps every error class to a status, and every error response has the same fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message

from application import call, posting, rejected
from bertserve.service.api.endpoint import Endpoint
from bertserve.service.api.error_answers import response
from bertserve.service.api.openapi import ErrorBody
from bertserve.service.errors import (
    ERROR_STATUSES,
    BertServeError,
    CallerError,
    MethodNotAllowedError,
    RefusedError,
    ServerError,
)
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks.json_text import to_json


def leaves(kind: type[BertServeError]) -> Iterator[type[BertServeError]]:
    for child in kind.__subclasses__():
        yield from leaves(child) if child.__subclasses__() else [child]


def made(kind: type[BertServeError]) -> BertServeError:
    if kind is RefusedError:
        return RefusedError("what was wrong", reason="queue_full", retry_after_s=1.2)
    if kind is MethodNotAllowedError:
        return MethodNotAllowedError("what was wrong", allowed="GET, POST")
    return kind("what was wrong")


def test_every_error_of_a_request_is_in_the_table() -> None:
    """The table has exactly the leaf classes of CallerError and ServerError."""
    assert set(ERROR_STATUSES) == {*leaves(CallerError), *leaves(ServerError)}


@pytest.mark.parametrize("kind", sorted(ERROR_STATUSES, key=lambda kind: kind.__name__))
def test_every_error_response_has_the_same_fields(kind: type[BertServeError]) -> None:
    answer = response(made(kind), "r-1")
    body = ErrorBody.model_validate_json(answer.body)
    assert body.model_dump() == {"error": "what was wrong", "error_type": ERROR_STATUSES[kind][1], "request_id": "r-1"}
    assert answer.status_code == ERROR_STATUSES[kind][0]
    assert to_json(json.loads(answer.body)) == answer.body  # the same style as other answers


def test_a_refusal_has_a_retry_after_header() -> None:
    """Its value is in whole seconds, rounded up and at least 1."""
    waits = {seconds: RefusedError("full", reason="queue_full", retry_after_s=seconds) for seconds in (0.0, 0.3, 1.2, 60.0)}
    assert [response(error, "r").headers["retry-after"] for error in waits.values()] == ["1", "1", "2", "60"]


@pytest.mark.parametrize("name", ["\n", "\r\nSet-Cookie: a=b", "\u202egood", "\ud800", "\x1b[2J", "good\0", "e\u0301 \u4e2d"])
@pytest.mark.parametrize("body", ['{"inputs": "good", "parameters": {%s: 1}}', '{"inputs": "good", "parameters": %s}'])
def test_an_error_has_no_control_characters_from_the_request(models: Path, name: str, body: str) -> None:
    """An error is one line of printable characters, whatever names and values it quotes."""
    answer = call(models, "POST", "/classify", content=(body % json.dumps(name)).encode())
    assert rejected(answer, *((400, "malformed") if name == "\ud800" else (422, "invalid_value"))).isprintable()


def test_a_long_unknown_name_is_shortened_in_the_error(models: Path) -> None:
    body = {"inputs": "good", "parameters": {"a" * 10_000: 1}}
    assert len(rejected(call(models, "POST", "/classify", json=body), 422, "invalid_value")) < 300


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/classify", {"POST"}),
        ("POST", "/models", {"GET"}),
        ("DELETE", "/models/tiny", {"GET", "POST"}),
    ],
)
def test_a_wrong_method_gets_the_allowed_methods(models: Path, method: str, path: str, allowed: set[str]) -> None:
    answer = call(models, method, path)
    rejected(answer, 405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == allowed


def test_a_status_is_counted_only_when_it_is_sent(models: Path) -> None:
    """If the server cannot send the response head, the caller gets a 500, and the 500 is counted."""
    state = build(Settings(models=models))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            raise ValueError("no header")
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"inputs": []}'}

    asyncio.run(Endpoint(state)(posting(), receive, send))  # type: ignore[arg-type]
    assert [message.get("status") for message in sent] == [500, None]
    page = state.metrics.page().decode()
    assert 'requests_total{model="tiny",status="500",task="text-classification"} 1.0' in page
    assert 'status="200"' not in page
