"""Whatever a caller sends, the answer is a result or one clear error: no 5xx, crash, hang, trace or path.

`make stress` runs a hundred thousand cases, others each time; `make test` two thousand, always the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostile
import tiny
from application import Send, started
from service.tasks.catalog import TASKS

CASES = int(os.environ.get("STRESS_CASES", "2000"))
ALLOWED = {200, 400, 404, 413, 415, 422}
LEAKS = ("Traceback", "site-packages", ".py", "/tmp", "/home", "service.", "pydantic_core", "<class")
MODELS = {
    "text-classification": "/models/classifier",
    "token-classification": "/models/names",
    "question-answering": "/models/passages",
    "fill-mask": "/models/masks",
    "feature-extraction": "/models/vectors",
}


@pytest.fixture(name="send", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """A service with a tiny model of every kind."""
    models = tmp_path_factory.mktemp("hostile") / "models"
    tiny.bundle(models, "classifier", max_length=64)
    tiny.bundle(models, "names", max_length=64, task="token-classification")
    tiny.bundle(models, "nli", max_length=64, labels=("contradiction", "entailment"))
    tiny.bundle(models, "ranker", max_length=64, labels=("LABEL_0",), activation="none")
    tiny.bundle(models, "passages", max_length=64, task="question-answering")
    tiny.bundle(models, "masks", max_length=64, task="fill-mask")
    tiny.bundle(models, "vectors", max_length=64, task="feature-extraction", embedding=tiny.EMBEDDING)
    with started(models) as send:
        yield send


def assert_clear(response: httpx.Response, sent: bytes) -> None:
    """Asserts that an answer is a result, or an error in the one shape that tells nothing of the inside."""
    assert response.status_code in ALLOWED, (response.status_code, response.text[:300], sent[:300])
    body = response.json()
    if response.status_code != 200:
        assert sorted(body) == ["error", "error_type", "request_id"]
        assert 10 < len(body["error"]) < 1_000, sent[:300]
        assert "\n" not in body["error"]
    leaked = [word for word in LEAKS if word in response.text and word.encode() not in sent]
    assert [] == leaked, (response.text[:300], sent[:300])
    for name, value in response.headers.items():
        assert value.isascii(), name
        assert value.isprintable(), name


@pytest.mark.parametrize("task", TASKS)
def test_no_body_breaks_an_endpoint(send: Send, task: str) -> None:
    """Sent to the task's path, and to a model's own."""
    paths = [f"/{TASKS[task].path}", MODELS.get(task, "/models/nli")]

    @settings(max_examples=CASES // len(TASKS), derandomize="STRESS_CASES" not in os.environ)
    @given(body=hostile.bodies(task), path=st.sampled_from(paths))
    def check(body: bytes, path: str) -> None:
        assert_clear(send("POST", path, content=body), body)

    check()
    assert send("GET", "/health").json() == {"ready": True, "live": True}
