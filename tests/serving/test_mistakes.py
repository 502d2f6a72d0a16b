"""Errors for common client mistakes say what the request looks like and what to send instead."""

from __future__ import annotations

import json
import re

import pytest

from application import Send, post, rejected
from bertserve.service.tasks.catalog import TASKS


@pytest.mark.parametrize(
    ("raw", "place"),
    [(b'{"inputs": {"a": 1}, "b": {', "at column 27;"), (b"good", "at column 1;"), (b'{"inputs": "a"}\n{}', "at line 2 column 1;")],
)
def test_the_error_for_invalid_json_has_the_place_and_the_example_of_openapi(api: Send, raw: bytes, place: str) -> None:
    """tests/serving/test_operations.py sends the examples of OpenAPI, so they are valid."""
    for path, task in (("/classify", "text-classification"), ("/models/passages", "question-answering")):
        message = rejected(api("POST", path, content=raw), 400, "malformed")
        assert place in message
        example = json.loads(message.partition("such as ")[2].removesuffix("."))
        assert [example] == TASKS[task].body.model_json_schema()["examples"]


@pytest.mark.parametrize(
    ("body", "path", "said"),
    [
        ("good", "/classify", 'is a text, .*`inputs`, .*{"inputs": "A warm'),
        (["good"], "/classify", "is a list, .*`inputs`,"),
        (None, "/classify", "is null, .*`inputs`,"),
        (5, "/answer", 'is a number, .*`inputs`, .*{"inputs": {"question": '),
        (["good"], "/models/passages", 'is a list, .*`inputs`, .*{"inputs": {"question": '),
        (["good"], "/rerank", 'is a list, .*`query`, `texts`, .*{"query": '),
    ],
)
def test_the_error_for_bare_inputs_shows_a_complete_body(api: Send, body: object, path: str, said: str) -> None:
    assert re.search(said, rejected(post(api, body, path=path), 422, "invalid_value"))


def test_the_error_for_an_unknown_path_lists_paths(api: Send) -> None:
    message = rejected(api("POST", f"/{'generate' * 500}"), 404, "not_found")
    assert " /classify, /ner, /answer, " in message
    assert len(message) < 300


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/classify", "/v1/embeddings", "/models/names", "/health"])
def test_the_error_for_a_slash_at_the_end_says_how_a_path_ends(api: Send, method: str, path: str) -> None:
    for slashes in ("/", "//"):
        response = api(method, path + slashes)
        assert (404, True) == (response.status_code, "without a slash at the end" in response.text)


@pytest.mark.parametrize("path", ["/classify", "/models/classifier", "/attention"])
@pytest.mark.parametrize("inputs", [[["good", "bad"]], ["good", ["good", "bad"]]])
def test_the_error_for_a_pair_in_a_list_shows_a_pair(api: Send, path: str, inputs: list[object]) -> None:
    message = rejected(
        post(api, {"inputs": inputs, "parameters": {"output_attentions": True} if "att" in path else {}}, path=path), 422, "invalid_value"
    )
    pair = json.loads(re.findall(r"\{.*\}", message)[0])
    assert 200 == post(api, {"inputs": [pair]}, path="/classify").status_code


@pytest.mark.parametrize("path", ["/answer", "/choose", "/similarity"])
@pytest.mark.parametrize("inputs", [[["good", "bad"]], ["good", "bad"]])
def test_the_error_for_a_list_in_place_of_an_object_shows_an_object(api: Send, path: str, inputs: list[object]) -> None:
    message = rejected(post(api, {"inputs": inputs}, path=path), 422, "invalid_value")
    item = json.loads(re.findall(r"\{.*\}", message)[0])
    assert "is wrong" not in post(api, {"inputs": item}, path=path).text  # the question is too long for this model
