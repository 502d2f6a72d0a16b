"""Any request gets a result or one clear error: no 5xx, crash, hang, traceback or path.

`make stress` runs 100,000 random cases; `make test` runs 500, always the same ones.
"""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.tasks.catalog import TASKS
from support import hostile, tiny
from support.app_client import Send

ALLOWED = {200, 400, 404, 413, 415, 422}
SHARE = 0.75  # share of all cases; test_raw_http.py and test_description.py have the rest
MODELS = {"text-classification": "/models/classifier", "feature-extraction": "/models/vectors"}
MODELS |= {task: f"/models/{name}" for name, task in tiny.TASKS_OF.items()}


def assert_clear(response: httpx.Response, request: bytes) -> None:
    """Asserts that a response is a result, or an error in the standard form that leaks no internals."""
    assert response.status_code in ALLOWED, (response.status_code, response.text[:300], request[:300])
    body = response.json()
    if response.status_code != 200:
        assert sorted(body) == ["error", "error_type", "request_id"]
        assert 10 < len(body["error"]) < 1_000, request[:300]
        assert "\n" not in body["error"]
    words = [word for word in hostile.LEAKS if word in response.text and word.encode() not in request]
    assert words == [], (response.text[:300], request[:300])
    for name, value in response.headers.items():
        assert value.isascii(), name
        assert value.isprintable(), name


@pytest.mark.parametrize("task", TASKS)
def test_no_body_breaks_an_endpoint(api: Send, task: str) -> None:
    paths = [f"/{TASKS[task].path}", MODELS.get(task, "/models/nli")]

    @hostile.cases(SHARE / len(TASKS))
    @given(body=hostile.bodies(task), path=st.sampled_from(paths))
    def check(body: bytes, path: str) -> None:
        assert_clear(api("POST", path, content=body), body)

    check()
    assert api("GET", "/health").json() == {"ready": True, "live": True}
