"""Errors for common client mistakes say what the request looks like and what to send instead."""

from __future__ import annotations

import json
import re

import pytest

from application import Send, post, rejected
from bertserve.service.tasks.catalog import TASKS

MULTIPART = b'--7d4b\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ngood\r\n--7d4b--\r\n'


@pytest.mark.parametrize(
    ("raw", "looks"),
    [
        (b"", "is empty"),
        (b"inputs=good", "(application/x-www-form-urlencoded)"),
        (b"inputs=good&parameters%5Btop_k%5D=1", "(application/x-www-form-urlencoded)"),
        (MULTIPART, "(multipart/form-data)"),
        ('{"inputs": "good"}'.encode("utf-8-sig"), "byte order mark"),
        ('{"inputs": "good"}'.encode("utf-16"), "UTF-16"),
        (b'{"inputs": "a"}\n{"inputs": "b"}', "`content-type: application/x-ndjson`"),
        (b'{"inputs": {"a": 1}, "b": {', "at column 27;"),
        (b"{'inputs': 'good'}", "single quotes"),
        (b"\x1f\x8b\x08\0", "(gzip)"),
        (b"good", "at column 1;"),
    ],
)
def test_the_error_for_invalid_json_says_what_the_body_looks_like(api: Send, raw: bytes, looks: str) -> None:
    classify = rejected(api("POST", "/classify", content=raw), 400, "malformed")
    answer = rejected(api("POST", "/models/passages", content=raw), 400, "malformed")

    assert looks in classify and '{"inputs": "A warm, funny and thoroughly engaging film.", "parameters": {"top_k": 1}}' in classify
    assert looks in answer and '"question": "Where was the bridge built?"' in answer


def test_the_example_in_an_error_is_that_of_openapi(api: Send) -> None:
    """tests/serving/test_operations.py sends the examples of OpenAPI, so this example is valid."""
    message = rejected(api("POST", "/answer", content=b""), 400, "malformed")
    example = json.loads(message.partition("such as ")[2].removesuffix("."))
    assert [example] == TASKS["question-answering"].body.model_json_schema()["examples"]


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
def test_the_error_for_a_slash_at_the_end_has_the_path_without_it(api: Send, method: str, path: str) -> None:
    for slashes in ("/", "//"):
        response = api(method, path + slashes)
        assert (404, True) == (response.status_code, f"`{path}`" in response.text)
    assert "slash" not in rejected(api(method, "/nothing/"), 404, "not_found")


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


@pytest.mark.parametrize(
    ("path", "name", "known"),
    [
        ("/classify", "return_all_scores", "`top_k`"),
        ("/ner", "grouped_entities", "`aggregation_strategy`"),
        ("/ner", "ignore_subwords", "`aggregation_strategy`"),
        ("/zero-shot", "multi_class", "`multi_label`"),
    ],
)
def test_the_error_for_a_former_parameter_of_transformers_names_its_replacement(api: Send, path: str, name: str, known: str) -> None:
    for body in ({"parameters": {name: True}}, {name: True}):
        message = rejected(post(api, {"inputs": "good"} | body, path=path), 422, "invalid_value")
        assert known in message
    assert "`top_k` to 1" not in rejected(
        post(api, {"inputs": "a [MASK]", "return_all_scores": True}, path="/fill-mask"), 422, "invalid_value"
    )
