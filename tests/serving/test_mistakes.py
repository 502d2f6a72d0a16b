"""What people send by mistake is told what it looks like, and what to send in its place."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import pytest

from application import Send, post, rejected
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
def test_a_body_that_is_no_json_is_told_what_it_looks_like(api: Send, raw: bytes, looks: str) -> None:
    classify = rejected(api("POST", "/classify", content=raw), 400, "malformed")
    answer = rejected(api("POST", "/models/passages", content=raw), 400, "malformed")

    assert looks in classify and '{"inputs": "A warm, funny and thoroughly engaging film.", "parameters": {"top_k": 1}}' in classify
    assert looks in answer and '"question": "Where was the bridge built?"' in answer


def test_every_example_in_a_message_is_one_that_is_answered(api: Send) -> None:
    """It is what OpenAPI shows, which tests/serving/test_operations.py sends."""
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
def test_inputs_alone_are_told_of_the_object_around_them(api: Send, body: object, path: str, said: str) -> None:
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
def test_a_wrong_path_is_told_the_nearest(api: Send, method: str, path: str, near: str) -> None:
    assert f"`{path}`; did you mean `{near}`?" in rejected(api(method, path), 404, "not_found")


@pytest.mark.parametrize("path", ["/nothing/like/it", "/v2/modles/x/infr", "/" + "x/" * 500])
def test_a_wrong_path_is_looked_for_in_bounded_time(api: Send, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """It is compared with all paths at once, and then step by step with the near ones only; not again when it is asked for again."""
    words = []
    near = difflib.get_close_matches

    def count(word: str, *args: Any, **options: Any) -> list[str]:
        words.append(word)
        return near(word, *args, **options)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    rejected(api("GET", path), 404, "not_found")
    assert (1, True) == (words.count(path[:64]), len(words) <= 10)
    rejected(api("GET", path), 404, "not_found")
    assert 1 == words.count(path[:64])


def test_a_wrong_path_of_openai_is_told_the_nearest(api: Send) -> None:
    error = api("POST", "/v1/embeding").json()["error"]
    assert ("not_found", True) == (error["code"], "did you mean `/v1/embeddings`?" in error["message"])


def test_a_path_like_no_other_is_told_which_there_are(api: Send) -> None:
    message = rejected(api("POST", f"/{'generate' * 500}"), 404, "not_found")
    assert " /classify, /ner, /answer, " in message
    assert len(message) < 300
