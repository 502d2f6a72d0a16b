"""Clients of Hugging Face: the base URL, which is the only one that they know of an Inference Endpoint, and answers for JavaScript."""

from pathlib import Path
from typing import Any

import pytest

import tiny
from application import Send, call, post, rejected

# ---- the base URL, and the path that SageMaker requires


QUESTION = {"question": "good ?", "context": "a film"}
CHOOSE = {"inputs": {"prompt": "a good", "choices": ["film", "book"]}}
ZERO = {"inputs": "good", "parameters": {"candidate_labels": ["film"]}}


@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice", "feature-extraction"]
)
def test_the_only_model_is_served_at_the_base_url(tmp_path: Path, task: str) -> None:
    tiny.bundle(tmp_path, "only", task=task)
    body = {"question-answering": {"inputs": QUESTION}, "multiple-choice": CHOOSE, "fill-mask": {"inputs": "a [MASK]"}}.get(
        task, {"inputs": "good"}
    )
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
    assert "/classify" in rejected(post(api, {"inputs": QUESTION}, path=path), 422, "invalid_value")


# ---- @huggingface/inference, detected by its User-Agent; tests/clients runs the client itself


AGENT = {"user-agent": "@huggingface/inference/4.13.30 Node.js/22"}
LABELS = {"parameters": {"candidate_labels": ["film", "book"]}}


@pytest.mark.parametrize(
    ("path", "one", "more"),
    [
        ("/ner", "a film", {}),
        ("/answer", QUESTION, {}),
        ("/answer", QUESTION, {"parameters": {"top_k": 2}}),
        ("/fill-mask", "a [MASK]", {}),
        ("/zero-shot", "good", LABELS),
        ("/models/nli", "good", LABELS),
        ("/classify", "good", {}),
        ("/embed", "good", {}),
    ],
)
def test_a_list_of_one_input_is_answered_like_a_single_input(api: Send, path: str, one: Any, more: dict[str, Any]) -> None:
    expected = post(api, {"inputs": one, **more}, path=path).json()
    assert expected == post(api, {"inputs": [one], **more}, path=path, headers=AGENT).json()
    if path not in ("/classify", "/embed"):
        assert [expected] == post(api, {"inputs": [one], **more}, path=path).json()


@pytest.mark.parametrize("inputs", ["a [MASK] [MASK]", ["a [MASK] [MASK]"]])
def test_several_masks_give_one_flat_list(api: Send, inputs: Any) -> None:
    first, second = post(api, {"inputs": "a [MASK] [MASK]"}, path="/fill-mask").json()
    assert first + second == post(api, {"inputs": inputs}, path="/fill-mask", headers=AGENT).json()


def test_tokens_have_an_entity_group(api: Send) -> None:
    body = {"inputs": "a film", "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    expected = post(api, body, path="/ner").json()
    assert expected
    assert [{"entity_group": item["entity"]} | item for item in expected] == post(api, body, path="/ner", headers=AGENT).json()


@pytest.mark.parametrize(
    ("path", "one", "more"), [("/classify", "good", {}), ("/ner", "good", {}), ("/answer", QUESTION, {}), ("/zero-shot", "good", LABELS)]
)
@pytest.mark.parametrize("count", [0, 2])
def test_lists_of_no_or_several_inputs_are_refused(api: Send, path: str, one: Any, more: dict[str, Any], count: int) -> None:
    message = rejected(post(api, {"inputs": [one] * count, **more}, path=path, headers=AGENT), 422, "invalid_value")
    assert "@huggingface/inference" in message
    assert count == len(post(api, {"inputs": [one] * count, **more}, path=path).json())
