"""The examples in `/docs`, which "Try it out" sends unchanged, against the embedded models."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def read(url: str, body: Any = None) -> Any:
    """Returns the JSON of a response, or the status of an error."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_first_example_of_each_path_succeeds(url: str) -> None:
    """`/choose` is the exception, because no embedded model does multiple choice. Paths for any model have an example per task."""
    document = read(f"{url}/openapi.json")
    answers = {}
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        own = document["components"]["schemas"].get(content.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
        if examples := own.get("examples"):
            answers[path] = read(url + path.replace("{name}", "sentiment"), examples[0])

    assert {"/choose": 404} == {path: answer for path, answer in answers.items() if isinstance(answer, int)}
    assert {"/rerank", "/v1/rerank", "/v2/rerank", "/v1/embeddings", "/predict"} < answers.keys()
