"""A POST to the base URL, which is the only URL that clients of an Inference Endpoint know."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny
from application import Send, call, post, rejected
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import CallerError
from bertserve.service.tasks.body import MAX_ITEMS
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.wire.call import Incoming
from bertserve.service.wire.hugging_face import read_at_base
from test_largest_bodies import BODIES, LIMITS, calls_of

QUESTION = {"inputs": {"question": "good ?", "context": "a film"}}
CHOOSE = {"inputs": {"prompt": "a good", "choices": ["film", "book"]}}
ZERO = {"inputs": "good", "parameters": {"candidate_labels": ["film"]}}
RANK = {"query": "good", "texts": ["bad"]}
SIMILAR = {"inputs": {"source_sentence": "good", "sentences": ["bad"]}}


@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice", "feature-extraction"]
)
def test_the_only_model_is_served_at_the_base_url(tmp_path: Path, task: str) -> None:
    tiny.bundle(tmp_path, "only", task=task)
    body = {"question-answering": QUESTION, "multiple-choice": CHOOSE, "fill-mask": {"inputs": "a [MASK]"}}.get(task, {"inputs": "good"})
    expected, actual = (call(tmp_path, "POST", path, json=body) for path in ("/models/only", "/"))

    assert (200, "only", expected.json()) == (actual.status_code, actual.headers["x-model"], actual.json())
    assert "did you mean `inputs`?" in rejected(call(tmp_path, "POST", "/", json={"input": "good"}), 422, "invalid_value")
    rejected(call(tmp_path, "POST", "/", content=b""), 400, "malformed")


def test_the_other_tasks_of_the_only_model_are_served_at_the_base_url(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, "nli", labels=("contradiction", "entailment"))
    assert [{"label": "film", "score": 1.0}] == [
        item | {"score": round(item["score"] + 0.5)} for item in call(tmp_path, "POST", "/", json=ZERO).json()
    ]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (QUESTION, "passages"),
        ({"inputs": [QUESTION["inputs"]]}, "passages"),
        (CHOOSE, "choices"),
        (ZERO, "nli"),
        (RANK, "ranker"),
        (SIMILAR, "vectors"),
        ({"inputs": "good", "parameters": {"function_to_apply": "none"}}, "attentive"),
        ({"inputs": "good", "parameters": {"aggregation_strategy": "none"}}, "names"),
        ({"inputs": "a [MASK]", "parameters": {"targets": ["film"]}}, "masks"),
        ({"inputs": "good", "normalize": True}, "vectors"),
        ({"inputs": "good", "model": "nli"}, "nli"),
        ({"inputs": "good", "model": "names"}, "names"),
    ],
)
def test_the_body_selects_one_of_several_models(api: Send, body: dict[str, Any], name: str) -> None:
    assert name == post(api, body, path="/").headers["x-model"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": "good"}, "several tasks, /classify, /ner, /fill-mask, /embed, /attention;"),
        ({"inputs": []}, "several tasks, /classify, /ner, /answer, /fill-mask, /choose, /embed, /attention;"),
        ({"inputs": "good", "parameters": {"top_k": 1}}, "several tasks, /classify, /fill-mask;"),
        ({"inputs": "good", "x": 1}, "loaded tasks, /classify, /ner, /answer,"),
        (["good"], "loaded tasks, /classify, /ner, /answer,"),
    ],
)
def test_a_body_that_fits_several_tasks_or_none_is_refused(api: Send, body: Any, said: str) -> None:
    assert said in rejected(post(api, body, path="/"), 422, "invalid_value")


def test_names_are_not_compared_with_those_of_each_task(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message does not use the result, and the comparison takes milliseconds."""
    monkeypatch.setattr(difflib, "get_close_matches", None)
    assert "fits none" in rejected(post(api, {"truncation_directon": 1}, path="/"), 422, "invalid_value")


def test_a_body_over_a_limit_is_too_large(api: Send) -> None:
    body = {"inputs": [QUESTION["inputs"]] * 600}
    assert "`inputs` has 600 items" in rejected(post(api, body, path="/"), 413, "too_large")


def test_an_unknown_model_and_form_data_are_refused(api: Send) -> None:
    assert "did you mean `masks`" in rejected(post(api, {"inputs": "good", "model": "maskss"}, path="/"), 404, "not_found")
    assert "form data" in rejected(api("POST", "/", content=b"inputs=good"), 400, "malformed")


@dataclass
class Loaded:
    """A stand-in for a registry and for a model that has every task."""

    name: str
    task: str
    tasks: tuple[str, ...]
    bundle: Bundle

    @property
    def models(self) -> dict[str, Loaded]:
        return {"a": self, "b": self}

    def get(self, name: str) -> Loaded:
        return self

    def for_task(self, task: str, name: str | None = None) -> Loaded:
        return self


@pytest.mark.parametrize(
    "name",
    [
        "texts",
        "unknown keys",
        *(pytest.param(name, marks=pytest.mark.full_grid) for name in ("pairs", "lists within lists", "questions", "sentences")),
    ],
)
def test_the_largest_bodies_are_read_with_few_function_calls(name: str) -> None:
    body = BODIES[name][1]()
    models: Any = Loaded("a", "text-classification", tuple(TASKS), None)  # type: ignore[arg-type]

    def read() -> None:
        with pytest.raises(CallerError) as caught:
            read_at_base(Incoming(body, {}, None, models, LIMITS))
        assert len(caught.value.message) < 600

    assert calls_of(read) <= 12 * MAX_ITEMS
