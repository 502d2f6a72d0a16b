"""The routes of Text Embeddings Inference, with the bodies of its API description."""

from pathlib import Path
from typing import Any

import pytest

from application import LONG, Send, answered, call, post, posted, rejected

PAIR = ["good film", "bad"]


def refused(api: Send, path: str, **body: Any) -> str:
    return rejected(post(api, body, path=path), 422, "invalid_value")


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
    expected = answered(api, "/classify", same)
    batch = isinstance(inputs, list) and not any(isinstance(each, str) for each in inputs)

    assert (expected if batch else expected[0]) == posted(api, "/predict", inputs=inputs)


def test_raw_scores_are_logits(api: Send) -> None:
    expected = answered(api, "/classify", "good", function_to_apply="none")
    more = {"truncate": True, "truncation_direction": "Right", "model": "classifier"}

    assert expected[0] == posted(api, "/predict", inputs="good", raw_scores=True, **more)
    assert "`truncation_direction` is wrong" in refused(api, "/predict", inputs="good", truncation_direction="Left")


@pytest.mark.parametrize("inputs", [["a", "b", "c"], [["a", "b", "c"]], [[]], ["a", ["b"]], [["a"], "b"]])
def test_an_invalid_sequence_is_refused(api: Send, inputs: Any) -> None:
    """The error shows the forms of a text, a pair and a batch."""
    assert '["a", "b"]' in refused(api, "/predict", inputs=inputs)


def test_long_texts_are_truncated_or_refused(api: Send) -> None:
    assert "1" == post(api, {"inputs": LONG}, path="/predict").headers["x-truncated"]
    assert "60 tokens" in refused(api, "/predict", inputs=LONG, truncate=False)


def test_embed_all_returns_a_vector_per_token(api: Send) -> None:
    """The vectors are those of `/embed` with pooling `none` and no normalization. One text gives a list with one item."""
    expected = posted(api, "/embed", inputs=["good film"], pooling="none", prompt_name="query", normalize=False)
    found = posted(api, "/embed_all", inputs="good film", prompt_name="query", truncate=True, truncation_direction="Left")

    assert expected == found
    assert [6] == [len(tokens) for tokens in found]


def test_bodies_of_tei_clients_are_accepted_at_shared_paths(api: Send) -> None:
    """The bodies have the same meaning at `/embed`, `/similarity` and `/rerank`, including capitalized values."""
    options = {"truncate": True, "truncation_direction": "Right"}
    embedded = posted(api, "/embed", inputs="good", normalize=True, prompt_name=None, dimensions=2, **options)
    assert [2] == [len(vector) for vector in embedded]
    ranked = posted(api, "/rerank", query="good", texts=["bad"], raw_scores=False, return_text=True, **options)
    assert [(0, "bad")] == [(each["index"], each["text"]) for each in ranked]
    compared = posted(api, "/similarity", inputs={"source_sentence": "good", "sentences": ["bad"]}, parameters=options)
    assert 1 == len(compared)


def test_inputs_and_characters_are_limited(models: Path) -> None:
    """The limits are those of all endpoints."""
    limits = {"max_inputs": 2, "max_chars": 9}
    assert 200 == call(models, "POST", "/predict", settings=limits, json={"inputs": [["a"]] * 2}).status_code
    for inputs, said in (([["a"]] * 3, "`inputs` has 3 items and 2 "), ("a" * 10, "9 are allowed")):
        assert said in rejected(call(models, "POST", "/predict", settings=limits, json={"inputs": inputs}), 413, "too_large")
