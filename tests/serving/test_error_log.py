"""What the log says of a request that failed: why, where and whose, and nothing of what was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from application import call
from bertserve.service.errors import InvalidValueError, MethodNotAllowedError, RefusedError
from bertserve.service.http.sentence import sentence_of

SECRET = "hunter2"


def post(models: Path, path: str, body: Any, **settings: Any) -> None:
    """Posts a body under the request id `r-1`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    call(models, "POST", path, content=content, headers={"x-request-id": "r-1"}, settings=settings)


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/classify", {"inputs": SECRET * 9}, "413 too_large r-1 POST /classify: the text has {} characters and {} are allowed; split it,"),
        ("/classify", {"inputs": 5, "model": SECRET}, "422 invalid_value r-1 POST /classify: `{}` is wrong: {}; it is {}."),
        ("/classify", f'{{"{SECRET}'.encode(), "400 malformed r-1 POST /classify: the body is not valid JSON: {}; send JSON{}."),
        (f"/{SECRET}", {}, "404 not_found r-1 POST unknown: there is no path `{}`"),
        (f"/models/{SECRET}", {}, "404 not_found r-1 POST /models/{name}: no model `{}` is loaded; {}"),
        ("/classify", {"inputs": "a", "model": SECRET}, "404 not_found r-1 POST /classify: no model `{}` is loaded; {}"),
    ],
)
def test_a_line_says_why_without_what_was_sent(models: Path, caplog: pytest.LogCaptureFixture, path: str, body: Any, line: str) -> None:
    """The message of the answer stands in the log with `{}` for each value, beside the request's id, method and path."""
    post(models, path, body, max_chars=50)
    [record] = [record for record in caplog.records if record.name == "bertserve.errors"]

    assert record.getMessage().startswith(line)
    assert record.__dict__["reason"].startswith(line.partition(": ")[2])
    assert SECRET not in caplog.text
    assert SECRET not in str(record.__dict__)


def test_an_error_line_has_the_fields_of_its_request(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A JSON line of an error can be read without that of the access."""
    post(models, "/models/tiny", {"inputs": 5})
    [record] = [record for record in caplog.records if record.name == "bertserve.errors"]
    names = ("request_id", "method", "path", "client", "task", "model", "status", "error_type")

    assert ("r-1", "POST", "/models/tiny", "127.0.0.1", "text-classification", "tiny", 422, "invalid_value") == tuple(
        record.__dict__[name] for name in names
    )


def many() -> RefusedError:
    """Returns an error of a class with arguments of its own."""
    return RefusedError(
        f"there are {SECRET} of " + f"{1}" + (" at once" if SECRET else ""),
        reason=f"{SECRET}",
        retry_after_s=1.0,
    )


def handed_on(message: str) -> InvalidValueError:
    """Returns an error whose sentence was made elsewhere."""
    return InvalidValueError(message)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (InvalidValueError("it is fixed"), "it is fixed"),
        (InvalidValueError(f"é `{SECRET}` is {len(SECRET)!r:>3}"), "é `{}` is {}"),
        (MethodNotAllowedError(f"not {SECRET}", allowed=SECRET), "not {}"),
        (many(), "there are {} of {}{}"),
        (handed_on(SECRET), f"test_error_log.py:{handed_on.__code__.co_firstlineno + 2} handed_on"),
    ],
)
def test_a_sentence_is_that_of_the_code(error: Any, sentence: str) -> None:
    """Of one line or several, of a class of its own; where there is none, the place."""
    assert sentence == sentence_of(error)
