"""The endpoints that SageMaker requires: `/ping`, and `/invocations` for any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from application import Send, call, call_fresh, post, rejected
from bertserve.service.scheduling.scheduler import Scheduler

PATH = "/invocations"


def test_a_single_model_needs_no_name(models: Path) -> None:
    answer = call(models, "POST", PATH, json={"inputs": "good"}, headers={"content-type": "application/json", "accept": "*/*"})

    assert call(models, "POST", "/models/tiny", json={"inputs": "good"}).json() == answer.json()
    assert "tiny" == answer.headers["x-model"]


@pytest.mark.parametrize(
    "body", [{"inputs": "a", "model": "names"}, {"inputs": "a", "model": "nli", "parameters": {"candidate_labels": "x,y"}}]
)
def test_a_body_names_one_of_several_models(api: Send, body: dict[str, Any]) -> None:
    """The body can also ask for another task of the model, as at the model's own path."""
    own = {key: value for key, value in body.items() if key != "model"}

    assert post(api, own, path=f"/models/{body['model']}").json() == post(api, body, path=PATH).json()


@pytest.mark.parametrize("body", [{"inputs": "a"}, {"inputs": "a", "model": None}, {"inputs": '"model"'}])
def test_several_models_need_a_name(api: Send, body: dict[str, Any]) -> None:
    """The task is not guessed if the body does not show it; the error lists the tasks."""
    assert "several tasks, /classify, /ner," in rejected(post(api, body, path=PATH), 422, "invalid_value")


def test_an_unknown_model_is_not_found(api: Send) -> None:
    assert "did you mean `names`?" in rejected(post(api, {"inputs": "a", "model": "name"}, path=PATH), 404, "not_found")


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": '])
def test_invalid_json_is_malformed(models: Path, content: bytes) -> None:
    rejected(call(models, "POST", PATH, content=content), 400, "malformed")


def test_ping_is_a_probe(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 200 if the service is ready, and 503 otherwise."""
    assert 200 == call(models, "GET", "/ping").status_code
    monkeypatch.setattr(Scheduler, "ready", False)
    rejected(call_fresh(models, "GET", "/ping"), 503, "unavailable")
