"""Errors for common client mistakes say what the request looks like and what to send instead."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import pytest

from application import Send, post, rejected
from bertserve.service.http import app
from bertserve.service.tasks.catalog import TASKS

MULTIPART = b'--7d4b\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ngood\r\n--7d4b--\r\n'


@pytest.mark.parametrize(
    ("raw", "looks"),
    [
        (b"", "is empty"),
        (b" \r\n\t", "is empty"),
        (b"inputs=good", "(application/x-www-form-urlencoded)"),
        (b"inputs=good&parameters%5Btop_k%5D=1", "(application/x-www-form-urlencoded)"),
        (MULTIPART, "(multipart/form-data)"),
        ('{"inputs": "good"}'.encode("utf-8-sig"), "byte order mark"),
        ('{"inputs": "good"}'.encode("utf-16"), "UTF-16"),
        ('{"inputs": "good"}'.encode("utf-16-le"), "UTF-16"),
        ('{"inputs": "good"}'.encode("utf-16-be"), "UTF-16"),
        (b'{"inputs": "a"}\n{"inputs": "b"}', "`content-type: application/x-ndjson`"),
        (b'{"inputs": "a"}{"inputs": "b"}', "`content-type: application/x-ndjson`"),
        (b'{"inputs": {"a": 1}, "b": {', "at column 27;"),
        (b"{'inputs': 'good'}", "single quotes"),
        (b"'{inputs: good}'", "single quotes"),
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
        (["good"], "/zero-shot", "is a list, .*`inputs`,"),
    ],
)
def test_the_error_for_bare_inputs_shows_a_complete_body(api: Send, body: object, path: str, said: str) -> None:
    assert re.search(said, rejected(post(api, body, path=path), 422, "invalid_value"))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/clasify", "/classify"),
        ("/classify/", "/classify"),
        ("/Classify", "/classify"),
        ("/zeroshot", "/zero-shot"),
        ("/embedding", "/embed"),
        ("/embeddings", "/v1/embeddings"),
        ("/healthz", "/health"),
        ("/metric", "/metrics"),
        ("/model", "/models"),
        ("/model/names", "/models/names"),
        ("/models/names/y", "/models/names"),
        ("/models/Names/predict", "/models/Names"),
        ("/models/names/realod", "/models/names/reload"),
        ("/models/some/y", "/models/some"),
        ("/v2/models/names/inferr", "/v2/models/names/infer"),
    ],
)
def test_the_error_for_an_unknown_path_suggests_the_nearest_path(
    api: Send, monkeypatch: pytest.MonkeyPatch, method: str, path: str, near: str
) -> None:
    monkeypatch.setattr(app, "SEARCH_EVERY_S", 0.0)
    assert f"`{path}`; did you mean `{near}`?" in rejected(api(method, path), 404, "not_found")


@pytest.mark.parametrize("path", ["/nothing/like/it", "/v2/modles/x/infr", "/" + "x/" * 500])
def test_the_search_for_the_nearest_path_is_bounded(api: Send, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The path is compared with all paths in one call, then by segments with similar paths."""
    words = []
    near = difflib.get_close_matches

    def count(word: str, *args: Any, **options: Any) -> list[str]:
        words.append(word)
        return near(word, *args, **options)

    monkeypatch.setattr(app, "SEARCH_EVERY_S", 0.0)
    monkeypatch.setattr(difflib, "get_close_matches", count)
    rejected(api("GET", path), 404, "not_found")
    assert (1, True) == (words.count(path[:64]), len(words) <= 10)


def test_searches_for_the_nearest_path_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller needs no key for them. A known path of OpenAI without `/v1` needs no search."""
    now, suggestions = 1e9, app.Suggestions(["/classify", "/v1/models"])
    monkeypatch.setattr(app.time, "monotonic", lambda: now)
    found = []
    for seconds in (0.0, 0.9, 0.2, 0.2):
        now += seconds * app.SEARCH_EVERY_S
        found.append((suggestions.nearest("/clasify"), suggestions.nearest("/models")))

    assert [("/classify", "/v1/models"), (None, "/v1/models"), ("/classify", "/v1/models"), (None, "/v1/models")] == found


def test_the_error_for_an_unknown_openai_path_suggests_the_nearest_path(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SEARCH_EVERY_S", 0.0)
    error = api("POST", "/v1/embeding").json()["error"]
    assert ("not_found", True) == (error["code"], "did you mean `/v1/embeddings`?" in error["message"])


def test_the_error_for_a_path_without_a_similar_one_lists_paths(api: Send) -> None:
    message = rejected(api("POST", f"/{'generate' * 500}"), 404, "not_found")
    assert " /classify, /ner, /answer, " in message
    assert len(message) < 300
