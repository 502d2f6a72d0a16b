"""The wire format of /classify: result shapes, parameters, accepted and refused bodies, and which model serves a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from application import classify, rejected, results

HUGE_NUMBER = b"9" * 5000


def labels(result: list[dict[str, Any]]) -> list[str]:
    return [item["label"] for item in result]


def test_a_text_gets_a_list_of_one_result(models: Path) -> None:
    [result] = results(models, "a good film")
    assert sorted(tiny.LABELS) == sorted(labels(result))
    assert all(sorted(item) == ["label", "score"] for item in result)


def test_a_pair_is_scored_as_one_input(models: Path) -> None:
    [pair] = results(models, {"text": "good", "text_pair": "bad"})
    [alone] = results(models, {"text": "good"})
    assert pair != alone
    assert results(models, "good") == [alone]


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (99, 3), (None, 3)])
def test_top_k_limits_the_labels(models: Path, top_k: int | None, count: int) -> None:
    """The `top_k` best labels are returned, or all if `top_k` is null or more than the number of labels."""
    [everything] = results(models, "a good film")
    assert results(models, "a good film", top_k=top_k) == [everything[:count]]


@pytest.mark.parametrize("name", ["softmax", "SoftMax", "SOFTMAX", None])
def test_the_activation_is_read_in_any_case(models: Path, name: str | None) -> None:
    """In any letter case, `softmax` is this model's default activation; null selects the default too."""
    assert results(models, "good", function_to_apply=name) == results(models, "good")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8", ""])
def test_the_content_type_does_not_matter(models: Path, content_type: str) -> None:
    """The body is parsed as JSON with any content type: `curl -d` sends that of a form."""
    response = classify(models, {"inputs": "good"}, headers={"content-type": content_type})
    assert response.json() == results(models, "good")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"good", id="no JSON"),
        pytest.param(b'{"inputs": "good"', id="cut off"),
        pytest.param(b'{"inputs": "good"} {}', id="more after the end"),
        pytest.param(b'{"inputs": "\xff\xfe"}', id="not UTF-8"),
        pytest.param(b'{"inputs": "good", "options": "\xff"}', id="not UTF-8 where nobody looks"),
        pytest.param(b'{"inputs": "\\ud800"}', id="leading surrogate alone"),
        pytest.param(b'{"inputs": "\\udc00 good"}', id="trailing surrogate alone"),
        pytest.param(b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", id="nested without end"),
        pytest.param(b'{"inputs": "good", "parameters": {"top_k": ' + HUGE_NUMBER + b"}}", id="number without end"),
    ],
)
def test_a_body_that_is_not_json_is_malformed(models: Path, raw: bytes) -> None:
    rejected(classify(models, raw), 400, "malformed")


@pytest.mark.parametrize(("path", "named"), [("/classify", {"model": "tinny"}), ("/models/tinny", {})])
def test_an_unknown_model_is_not_found_and_the_nearest_name_suggested(models: Path, path: str, named: dict[str, str]) -> None:
    assert "did you mean `tiny`?" in rejected(classify(models, {"inputs": "good", **named}, path=path), 404, "not_found")
