"""Logs: a line of a failed request has the reason, but no data of its caller; and a slow reader never blocks the event loop."""

import io
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.logs import background_logging, configure_logging
from bertserve.service.tasks.catalog import TASKS
from support import hostile
from support.app_client import Send, call

SECRET = "hunter2"


def post(models: Path, path: str, body: Any, **settings: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    call(models, "POST", path, content=content, headers={"x-request-id": "r-1"}, settings=settings)


@pytest.mark.parametrize(
    ("path", "body", "start", "value"),
    [
        ("/classify", {"inputs": SECRET * 9}, "413 too_large r-1 POST /classify", "63 characters and 50 "),
        ("/classify", f'{{"{SECRET}'.encode(), "400 malformed r-1 POST /classify", "at column 9;"),
        (f"/{SECRET}", {}, "404 not_found r-1 POST unknown", "`{path}`"),
        (f"/models/{SECRET}", {}, "404 not_found r-1 POST /models/{name}", "`{name}`"),
    ],
)
def test_a_log_line_has_the_reason_without_the_callers_data(
    models: Path, caplog: pytest.LogCaptureFixture, path: str, body: Any, start: str, value: str
) -> None:
    """The message has placeholders instead of the caller's values, after the request's id, method and path."""
    post(models, path, body, max_chars=50)
    [record] = [record for record in caplog.records if hasattr(record, "request_id")]
    reason = record.__dict__["reason"]

    assert record.getMessage() == f"{start}: {reason}"
    assert value in reason
    assert SECRET not in caplog.text
    assert SECRET not in str(record.__dict__)


NUMBER = 918_273_645


def attacks(example: Any, fields: Iterable[str] = ()) -> Iterator[Any]:
    """Yields a body with a secret in place of each value, as a key of each object, and in each of some fields."""
    for place in hostile.places(example):
        for value in (SECRET, NUMBER, -NUMBER, [SECRET, NUMBER], {SECRET: SECRET}, f"{SECRET} [mask] <mask>"):
            yield hostile.replace_at(example, place, value)
        if isinstance(hostile.at(example, place), dict):
            yield hostile.replace_at(example, (*place, SECRET), SECRET)
    for name in fields:
        for value in (SECRET, NUMBER, -NUMBER, [NUMBER, NUMBER], [SECRET]):
            yield example | {name: value}
            yield example | {"parameters": {name: value}}


def tensor(data: Any = ("a",), **fields: Any) -> dict[str, Any]:
    """Returns the body of an `infer` request with one tensor."""
    return {"inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [1], "data": data} | fields]}


INFER = "/v2/models/masks/infer"
# requests that one wrong value in an example does not make
MORE: list[tuple[str, Any, dict[str, str]]] = [
    ("/classify", {"inputs": "a"}, {"content-encoding": SECRET}),
    ("/classify", {"inputs": "a"}, {"x-request-timeout-ms": SECRET}),
    ("/classify", {"inputs": "a", "options": {SECRET: 1}}, {}),
    (f"/classify/%2e/{SECRET}", {}, {}),
    (f"/classify/{SECRET}", {}, {}),
    ("/models/masks", {"inputs": "a", "model": f"masks{SECRET}"}, {}),
    ("/classify", {"inputs": "a", "model": f"classifier{SECRET}"}, {}),
    ("/attention", {"inputs": "a", "parameters": {"layers": [NUMBER % 2, NUMBER % 2]}}, {}),
    ("/zero-shot", {"inputs": "a", "parameters": {"candidate_labels": [f"{SECRET} " * 99, "b"]}}, {}),
    ("/zero-shot", {"inputs": "a", "parameters": {"candidate_labels": [SECRET, SECRET]}}, {}),
    (INFER, tensor(name=SECRET), {}),
    (INFER, tensor(datatype="INT64", data=[1]), {}),
    (INFER, tensor(shape=[NUMBER]), {}),
    (INFER, tensor(shape=[1, NUMBER]), {}),
    (INFER, tensor(data=[NUMBER]), {}),
    (INFER, tensor(data=[SECRET]) | {"outputs": [{"name": SECRET}]}, {}),
    (INFER, tensor() | {"outputs": [{"name": "scores", "parameters": {SECRET: NUMBER}}]}, {}),
    (INFER, {"inputs": [*tensor(name=SECRET)["inputs"], *tensor(name=SECRET)["inputs"]]}, {}),
    (INFER, tensor(data=None), {}),
    (INFER, tensor(data=None, parameters={"binary_data_size": NUMBER}), {}),
    (INFER, tensor(), {"inference-header-content-length": SECRET}),
    (INFER, tensor() | {"parameters": {"priority": SECRET}}, {}),
]


def examples(description: Any, operation: Any) -> list[Any]:
    """Returns the examples of a path's body in the OpenAPI description."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    values = [example["value"] for example in content.get("examples", {}).values()]
    kind = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return values or description["components"]["schemas"].get(kind, {}).get("examples", [])


def test_no_error_logs_a_value_of_its_caller(api: Send, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of the examples of all paths is replaced: the answers quote the secrets, and the log never does."""
    monkeypatch.setattr("bertserve.service.api.error_responses.MAX_LINES", 10**9)
    description = api("GET", "/openapi.json").json()
    fields = {f"/{spec.path}": {*spec.body.model_fields, *spec.body.parameters_type.model_fields} for spec in TASKS.values()}
    requests = [("POST", path, body, headers) for path, body, headers in MORE]
    for path, operations in description["paths"].items():
        url = path.replace("{name}", "masks").replace("{version}", "1")
        for method, operation in operations.items():
            requests += [
                (method, path.replace("{name}", SECRET).replace("{version}", SECRET), {}, {}),
                (method, f"{url}?{SECRET}=1", {}, {}),
            ]
            requests += [
                (method, url, body, {})
                for example in examples(description, operation)
                for body in attacks(example, sorted(fields.get(path, ())))
            ]
    answers = [api(method, path, content=json.dumps(body).encode(), headers=headers) for method, path, body, headers in requests]

    assert sum(SECRET in answer.text or str(NUMBER) in answer.text for answer in answers) > len(answers) / 4
    lines = [str(vars(record)) for record in caplog.records]
    assert [line for line in lines if SECRET in line or str(NUMBER) in line] == []


def test_an_error_line_has_the_fields_of_its_request(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    post(models, "/models/tiny", {"inputs": 5})
    [record] = [record for record in caplog.records if hasattr(record, "request_id")]
    request = {"request_id": "r-1", "method": "POST", "path": "/models/tiny", "client": "127.0.0.1"}
    expected = request | {"task": "text-classification", "model": "tiny", "status": 422, "error_type": "invalid_value"}

    assert {name: record.__dict__[name] for name in expected} == expected


logger = logging.getLogger("bertserve.test")


class Stderr(io.StringIO):
    """A stream whose writes block until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        assert self.gate.wait(20)
        return super().write(text)


@pytest.fixture(name="stderr")
def blocked_stderr() -> Iterator[Stderr]:
    """Yields a stderr that nothing reads; restores the root logger afterwards."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with redirect_stderr(Stderr()) as stderr:
        configure_logging("json")
    yield stderr
    stderr.gate.set()
    root.handlers = before[1]
    root.setLevel(before[0])


def test_an_unread_log_does_not_block_logging(stderr: Stderr) -> None:
    """Lines wait up to a limit; further lines are lost, and a later line reports how many."""
    with background_logging(max_waiting=5):
        for number in range(20):
            logger.info("line %d", number, extra={"number": number})
        stderr.gate.set()
        while "line 4" not in stderr.getvalue():
            threading.Event().wait(0.01)
        logger.info("later")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    losses = [line["message"] for line in lines if " lines were lost " in line["message"]]
    assert [line["number"] for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert set(lines[0]) == {"level", "logger", "message", "number", "pid", "time"}
    assert losses  # two reports if the thread took its first line between two lines of the test
    assert 20 + 1 - (len(lines) - len(losses)) == sum(int(text.split()[0]) for text in losses)
    assert lines[-1]["message"] == "later"
