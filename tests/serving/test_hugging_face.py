"""Clients of Hugging Face: the base URL of an Inference Endpoint, answers for JavaScript, and Text Embeddings Inference."""

from pathlib import Path
from typing import Any

import pytest

from support import tiny
from support.app_client import Send, call, error_of, error_of_body, post, result, result_of

# the base URL, and the path that SageMaker requires
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
        assert actual.status_code == 200
        assert actual.headers["x-model"] == "only"
        assert actual.json() == expected
        assert "did you mean `inputs`?" in error_of(call(tmp_path, "POST", path, json={"input": "good"}), 422, "invalid_value")
        error_of(call(tmp_path, "POST", path, content=b""), 400, "malformed")


def test_the_other_tasks_of_the_only_model_are_served_at_the_base_url(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, "nli", labels=("contradiction", "entailment"))
    assert [item | {"score": round(item["score"] + 0.5)} for item in call(tmp_path, "POST", "/", json=ZERO).json()] == [
        {"label": "film", "score": 1.0}
    ]


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_several_models_need_another_path(api: Send, path: str) -> None:
    assert "/classify" in error_of(post(api, {"inputs": QUESTION}, path=path), 422, "invalid_value")


# @huggingface/inference, detected by its User-Agent; tests/clients runs the client itself
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
    assert post(api, {"inputs": [one], **more}, path=path, headers=AGENT).json() == expected
    if path not in ("/classify", "/embed"):
        assert post(api, {"inputs": [one], **more}, path=path).json() == [expected]


@pytest.mark.parametrize("inputs", ["a [MASK] [MASK]", ["a [MASK] [MASK]"]])
def test_several_masks_give_one_flat_list(api: Send, inputs: Any) -> None:
    first, second = post(api, {"inputs": "a [MASK] [MASK]"}, path="/fill-mask").json()
    assert post(api, {"inputs": inputs}, path="/fill-mask", headers=AGENT).json() == first + second


def test_tokens_have_an_entity_group(api: Send) -> None:
    body = {"inputs": "a film", "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    expected = post(api, body, path="/ner").json()
    assert expected
    assert post(api, body, path="/ner", headers=AGENT).json() == [{"entity_group": item["entity"]} | item for item in expected]


@pytest.mark.parametrize(
    ("path", "one", "more"), [("/classify", "good", {}), ("/ner", "good", {}), ("/answer", QUESTION, {}), ("/zero-shot", "good", LABELS)]
)
@pytest.mark.parametrize("count", [0, 2])
def test_lists_of_no_or_several_inputs_are_refused(api: Send, path: str, one: Any, more: dict[str, Any], count: int) -> None:
    message = error_of(post(api, {"inputs": [one] * count, **more}, path=path, headers=AGENT), 422, "invalid_value")
    assert "@huggingface/inference" in message
    assert len(post(api, {"inputs": [one] * count, **more}, path=path).json()) == count


# the routes of Text Embeddings Inference, with the bodies of its API description
PAIR = ["good film", "bad"]


@pytest.mark.parametrize(
    ("inputs", "same"),
    [
        ("good", ["good"]),
        (["good"], ["good"]),
        (PAIR, [{"text": PAIR[0], "text_pair": PAIR[1]}]),
        ([["good"], ["bad"]], ["good", "bad"]),
        ([["good"], PAIR], ["good", {"text": PAIR[0], "text_pair": PAIR[1]}]),
        ([["good"]], ["good"]),
        ([], []),
    ],
)
def test_texts_and_pairs_are_classified(api: Send, inputs: Any, same: Any) -> None:
    expected = result_of(api, "/classify", same)
    batch = isinstance(inputs, list) and not any(isinstance(item, str) for item in inputs)

    assert result(api, "/predict", inputs=inputs) == (expected if batch else expected[0])


def test_raw_scores_are_logits(api: Send) -> None:
    expected = result_of(api, "/classify", "good", function_to_apply="none")
    more = {"truncate": True, "truncation_direction": "Right", "model": "classifier"}

    assert result(api, "/predict", inputs="good", raw_scores=True, **more) == expected[0]
    assert "`truncation_direction` must be" in error_of_body(api, "/predict", {"inputs": "good", "truncation_direction": "Left"})


@pytest.mark.parametrize("inputs", [["a", "b", "c"], [["a", "b", "c"]], [[]], ["a", ["b"]], [["a"], "b"]])
def test_an_invalid_sequence_is_refused(api: Send, inputs: Any) -> None:
    assert '["a", "b"]' in error_of_body(api, "/predict", {"inputs": inputs})


def test_embed_all_returns_a_vector_per_token(api: Send) -> None:
    """The vectors equal those of `/embed` with pooling `none` and no normalization. One text gives a list with one item."""
    expected = result(api, "/embed", inputs=["good film"], pooling="none", prompt_name="query", normalize=False)
    vectors = result(api, "/embed_all", inputs="good film", prompt_name="query", truncate=True, truncation_direction="Left")

    assert vectors == expected
    assert [len(tokens) for tokens in vectors] == [6]


def test_bodies_of_tei_clients_are_accepted_at_shared_paths(api: Send) -> None:
    """The bodies have the same meaning at `/embed`, `/similarity` and `/rerank`, including capitalized values."""
    options = {"truncate": True, "truncation_direction": "Right"}
    vectors = result(api, "/embed", inputs="good", normalize=True, prompt_name=None, dimensions=2, **options)
    assert [len(vector) for vector in vectors] == [2]
    texts = result(api, "/rerank", query="good", texts=["bad"], raw_scores=False, return_text=True, **options)
    assert [(item["index"], item["text"]) for item in texts] == [(0, "bad")]
    scores = result(api, "/similarity", inputs={"source_sentence": "good", "sentences": ["bad"]}, parameters=options)
    assert len(scores) == 1
