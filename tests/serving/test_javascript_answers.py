"""@huggingface/inference, detected by its User-Agent, gets responses in the form that it reads; tests/clients runs the client itself."""

from __future__ import annotations

from typing import Any

import pytest

from application import Send, post, rejected

AGENT = {"user-agent": "@huggingface/inference/4.13.30 Node.js/22"}
QUESTION = {"question": "good ?", "context": "a film"}
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
