"""The routes of Text Embeddings Inference, with bodies as its description has them."""

from __future__ import annotations

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
def test_more_than_two_texts_are_no_sequence(api: Send, inputs: Any) -> None:
    """Who takes `/predict` for an endpoint of lists is told how a batch is sent."""
    assert '["a", "b"]' in refused(api, "/predict", inputs=inputs)


def test_long_texts_are_cut_or_refused(api: Send) -> None:
    assert "1" == post(api, {"inputs": LONG}, path="/predict").headers["x-truncated"]
    assert "60 tokens" in refused(api, "/predict", inputs=LONG, truncate=False)


def test_each_token_has_a_vector(api: Send) -> None:
    """Those of `/embed` with the pooling `none`, not normalized; one text makes a list of one."""
    expected = posted(api, "/embed", inputs=["good film"], pooling="none", prompt_name="query", normalize=False)
    found = posted(api, "/embed_all", inputs="good film", prompt_name="query", truncate=True, truncation_direction="Left")

    assert expected == found
    assert [6] == [len(tokens) for tokens in found]


def test_no_model_has_sparse_vectors(api: Send) -> None:
    rejected(post(api, {"inputs": "good"}, path="/embed_sparse"), 404, "not_found")


def test_bodies_of_shared_paths_are_read(api: Send) -> None:
    """What its clients send to `/embed`, `/similarity` and `/rerank` means the same there, upper case included."""
    options = {"truncate": True, "truncation_direction": "Right"}
    embedded = posted(api, "/embed", inputs="good", normalize=True, prompt_name=None, dimensions=2, **options)
    assert [2] == [len(vector) for vector in embedded]
    ranked = posted(api, "/rerank", query="good", texts=["bad"], raw_scores=False, return_text=True, **options)
    assert [(0, "bad")] == [(each["index"], each["text"]) for each in ranked]
    compared = posted(api, "/similarity", inputs={"source_sentence": "good", "sentences": ["bad"]}, parameters=options)
    assert 1 == len(compared)


def test_tokens_are_shown_with_their_places(api: Send) -> None:
    """The ids are the model's input, special tokens have no place, and `start` and `stop` count code points of the text."""
    (tokens,) = posted(api, "/tokenize", inputs="\U0001f600 good", model="classifier")

    assert ["[CLS]", "\U0001f600", "good", "[SEP]"] == [token["text"] for token in tokens]
    assert [None, (0, 1), (2, 6), None] == [None if token["special"] else (token["start"], token["stop"]) for token in tokens]
    assert [2, 3] == [tokens[0]["id"], tokens[-1]["id"]]
    assert tokens[1:-1] == posted(api, "/tokenize", inputs=["\U0001f600 good"], model="classifier", add_special_tokens=False)[0]


def test_long_texts_are_tokenized_whole(api: Send) -> None:
    assert [62, 2] == [len(tokens) for tokens in posted(api, "/tokenize", inputs=[LONG, ""], model="classifier")]


def test_ids_become_texts(api: Send) -> None:
    ids = [token["id"] for token in posted(api, "/tokenize", inputs="good film", model="classifier")[0]]

    assert ["good film"] == posted(api, "/decode", ids=ids, model="classifier")
    assert ["good film", "[CLS]"] == posted(api, "/decode", ids=[ids[1:-1], ids[:1]], skip_special_tokens=False, model="classifier")
    assert [] == posted(api, "/decode", ids=[], model="classifier")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/decode", {"ids": [[1, 999_999]]}, "token id 999999"),
        ("/decode", {"ids": [-1]}, "`ids[0][0]` is wrong"),
        ("/decode", {"ids": [2**31]}, "`ids[0][0]` is wrong"),
        ("/decode", {"ids": ["a"]}, "`ids[0][0]` is wrong"),
        ("/decode", {"ids": [[1], 2]}, "`ids[1]` is wrong"),
        ("/decode", {"inputs": "a"}, "`inputs`"),
        ("/tokenize", {"inputs": 1}, "`inputs` is wrong"),
        ("/tokenize", {"inputs": "a", "add_special": False}, "did you mean `add_special_tokens`?"),
        ("/tokenize", {"inputs": "a", "model": None}, "`attentive`, "),
    ],
)
def test_wrong_bodies_are_refused(api: Send, path: str, body: dict[str, Any], message: str) -> None:
    """An unknown id would be left out silently by the tokenizer."""
    assert message in refused(api, path, **{"model": "classifier"} | body)


@pytest.mark.parametrize(("path", "field", "item"), [("/tokenize", "inputs", "a"), ("/decode", "ids", [1]), ("/predict", "inputs", ["a"])])
def test_limits_hold(models: Path, path: str, field: str, item: Any) -> None:
    """Inputs and characters are limited as everywhere; a service of one model needs no name."""
    limits = {"max_inputs": 2, "max_chars": 9}
    assert 200 == call(models, "POST", path, settings=limits, json={field: [item] * 2}).status_code
    message = rejected(call(models, "POST", path, settings=limits, json={field: [item] * 3}), 413, "too_large")
    assert f"`{field}` has 3 items and 2 " in message
    if path != "/decode":
        body = {field: "a" * 10}
        assert "9 are allowed" in rejected(call(models, "POST", path, settings=limits, json=body), 413, "too_large")


def test_tokenizing_is_admitted_as_any_work(models: Path) -> None:
    """What is more than the queue holds is refused before it is tokenized; the answer says where the time went, and is counted."""
    settings = {"max_queue_tokens": 64, "max_batch_tokens": 64}
    rejected(call(models, "POST", "/tokenize", settings=settings, json={"inputs": "good " * 100}), 413, "too_large")
    rejected(call(models, "POST", "/decode", settings=settings, json={"ids": [1] * 100}), 413, "too_large")
    answer = call(models, "POST", "/tokenize", settings=settings, json={"inputs": "good"})
    assert "tokenize;dur=" in answer.headers["server-timing"]
    page = call(models, "GET", "/metrics", settings=settings).text
    assert 'bertserve_requests_total{model="tiny",status="200",task="tokenize"}' in page
