"""A POST to the base URL, which is the only URL that clients of an Inference Endpoint know, and to the path that SageMaker requires."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from application import Send, call, post, rejected

QUESTION = {"inputs": {"question": "good ?", "context": "a film"}}
CHOOSE = {"inputs": {"prompt": "a good", "choices": ["film", "book"]}}
ZERO = {"inputs": "good", "parameters": {"candidate_labels": ["film"]}}


@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice", "feature-extraction"]
)
def test_the_only_model_is_served_at_the_base_url(tmp_path: Path, task: str) -> None:
    tiny.bundle(tmp_path, "only", task=task)
    body = {"question-answering": QUESTION, "multiple-choice": CHOOSE, "fill-mask": {"inputs": "a [MASK]"}}.get(task, {"inputs": "good"})
    expected = call(tmp_path, "POST", "/models/only", json=body).json()
    for path in ("/", "/invocations"):
        actual = call(tmp_path, "POST", path, json=body)
        assert (200, "only", expected) == (actual.status_code, actual.headers["x-model"], actual.json())
        assert "did you mean `inputs`?" in rejected(call(tmp_path, "POST", path, json={"input": "good"}), 422, "invalid_value")
        rejected(call(tmp_path, "POST", path, content=b""), 400, "malformed")


def test_the_other_tasks_of_the_only_model_are_served_at_the_base_url(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, "nli", labels=("contradiction", "entailment"))
    assert [{"label": "film", "score": 1.0}] == [
        item | {"score": round(item["score"] + 0.5)} for item in call(tmp_path, "POST", "/", json=ZERO).json()
    ]


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_several_models_need_another_path(api: Send, path: str) -> None:
    assert "/classify" in rejected(post(api, QUESTION, path=path), 422, "invalid_value")
