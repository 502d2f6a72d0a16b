"""The endpoints that SageMaker requires: `/ping`, and `/invocations` for any model."""

from __future__ import annotations

from pathlib import Path

import pytest

from application import call, call_fresh, rejected
from bertserve.service.scheduling.scheduler import Scheduler

PATH = "/invocations"


def test_a_single_model_needs_no_name(models: Path) -> None:
    answer = call(models, "POST", PATH, json={"inputs": "good"}, headers={"content-type": "application/json", "accept": "*/*"})

    assert call(models, "POST", "/models/tiny", json={"inputs": "good"}).json() == answer.json()
    assert "tiny" == answer.headers["x-model"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": '])
def test_invalid_json_is_malformed(models: Path, content: bytes) -> None:
    rejected(call(models, "POST", PATH, content=content), 400, "malformed")


def test_ping_is_a_probe(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 200 if the service is ready, and 503 otherwise."""
    assert 200 == call(models, "GET", "/ping").status_code
    monkeypatch.setattr(Scheduler, "ready", False)
    rejected(call_fresh(models, "GET", "/ping"), 503, "unavailable")
