"""What SageMaker asks of a container: `/ping`, and `/invocations` for whatever model is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from application import Send, call, call_fresh, post, rejected
from bertserve.service.scheduling.scheduler import Scheduler

PATH = "/invocations"


def test_the_one_model_answers(models: Path) -> None:
    answer = call(models, "POST", PATH, json={"inputs": "good"}, headers={"content-type": "application/json", "accept": "*/*"})

    assert call(models, "POST", "/models/tiny", json={"inputs": "good"}).json() == answer.json()
    assert "tiny" == answer.headers["x-model"]


@pytest.mark.parametrize(
    "body", [{"inputs": "a", "model": "names"}, {"inputs": "a", "model": "nli", "parameters": {"candidate_labels": "x,y"}}]
)
def test_a_body_names_one_of_several(api: Send, body: dict[str, Any]) -> None:
    """And may ask for another task of it, as at the model's own path; the base URL says more of it."""
    own = {key: value for key, value in body.items() if key != "model"}

    assert post(api, own, path=f"/models/{body['model']}").json() == post(api, body, path=PATH).json()


@pytest.mark.parametrize("body", [{"inputs": "a"}, {"inputs": "a", "model": None}, {"inputs": '"model"'}])
def test_several_models_want_a_name(api: Send, body: dict[str, Any]) -> None:
    """Where the body does not show its task nothing is guessed; the message lists what it could be for."""
    assert "several tasks, /classify, /ner," in rejected(post(api, body, path=PATH), 422, "invalid_value")


def test_an_unknown_model_is_not_found(api: Send) -> None:
    assert "did you mean `names`?" in rejected(post(api, {"inputs": "a", "model": "name"}, path=PATH), 404, "not_found")


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": '])
def test_what_is_no_json_is_malformed(models: Path, content: bytes) -> None:
    rejected(call(models, "POST", PATH, content=content), 400, "malformed")


def test_ping_is_a_probe(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 200 while requests are answered, and else 503."""
    assert 200 == call(models, "GET", "/ping").status_code
    monkeypatch.setattr(Scheduler, "ready", False)
    rejected(call_fresh(models, "GET", "/ping"), 503, "unavailable")
