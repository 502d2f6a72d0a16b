"""The wire format of /classify: parameters, accepted and refused bodies, and long texts, which are truncated, refused or scored in windows."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support import tiny
from support.app_client import LONG, call, error_of, post, result_of

HUGE_NUMBER = b"9" * 5000


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8", ""])
def test_the_content_type_does_not_matter(models: Path, content_type: str) -> None:
    """The body is parsed as JSON with any content type: `curl -d` sends that of a form."""
    response = post(models, {"inputs": "good"}, headers={"content-type": content_type})
    assert result_of(models, "/classify", "good") == response.json()


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"good", id="no JSON"),
        pytest.param(b'{"inputs": "good"', id="cut off"),
        pytest.param(b'{"inputs": "good"} {}', id="more after the end"),
        pytest.param(b'{"inputs": "\xff\xfe"}', id="not UTF-8"),
        pytest.param(b'{"inputs": "good", "options": "\xff"}', id="not UTF-8 in a value that is ignored"),
        pytest.param(b'{"inputs": "\\ud800"}', id="leading surrogate alone"),
        pytest.param(b'{"inputs": "\\udc00 good"}', id="trailing surrogate alone"),
        pytest.param(b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", id="nested without end"),
        pytest.param(b'{"inputs": "good", "parameters": {"top_k": ' + HUGE_NUMBER + b"}}", id="number without end"),
    ],
)
def test_a_body_that_is_not_json_is_malformed(models: Path, raw: bytes) -> None:
    error_of(post(models, raw), 400, "malformed")


ROOM = 30  # text tokens that fit a tiny bundle; 29 for a pair


def words(count: int) -> str:
    return " ".join((LONG.split() * 5)[:count])


@pytest.mark.parametrize(
    ("inputs", "count", "warning"),
    [
        (LONG, "1", "truncation; .* 32 tokens: inputs"),
        (["good", LONG, words(ROOM), {"text": "good", "text_pair": LONG}], "2", r"truncation; 2 of 4 inputs .*: inputs\[1\], inputs\[3\]"),
        ([LONG] * 40, "40", r"truncation; .* inputs\[8\], inputs\[9\], \.\.\."),
    ],
)
def test_truncated_inputs_are_counted_and_named(models: Path, inputs: Any, count: str, warning: str) -> None:
    headers = post(models, {"inputs": inputs}).headers
    assert headers["x-truncated"] == count
    assert re.fullmatch(warning, headers["x-hf-warning"])


def test_a_stride_without_windows_is_an_error(models: Path) -> None:
    assert "`window`" in error_of(post(models, {"inputs": "good", "parameters": {"stride": 2}}), 422, "invalid_value")


def test_an_empty_text_is_answered_with_a_warning(models: Path) -> None:
    """The pipeline answers an empty text too. For a list, the warning names the empty inputs."""
    for text in ("", " \n"):
        response = post(models, {"inputs": text})
        assert response.status_code == 200
        assert response.headers["x-hf-warning"].startswith("empty; ")
        assert "inputs[" not in response.headers["x-hf-warning"]
    assert post(models, {"inputs": ["", "good", ""]}).headers["x-hf-warning"].endswith(": inputs[0], inputs[2]")
    assert "x-hf-warning" not in post(models, {"inputs": {"text": "", "text_pair": "good"}}).headers


@pytest.mark.parametrize("parameters", [{}, {"truncation": False}, {"window": "mean"}])
def test_a_text_of_the_maximum_length_is_not_truncated(models: Path, parameters: dict[str, Any]) -> None:
    response = post(models, {"inputs": words(ROOM), "parameters": parameters})
    assert response.status_code == 200
    assert "x-truncated" not in response.headers
    assert "x-hf-warning" not in response.headers


def test_the_default_stride_fits_the_model(models: Path) -> None:
    """By default, windows overlap by half if an overlap of 128 tokens does not fit."""
    assert result_of(models, "/classify", LONG, window="max") == result_of(models, "/classify", LONG, window="max", stride=ROOM // 2)


def test_the_windows_of_a_text_are_reported(tmp_path: Path) -> None:
    """`x-windows` lists overlapping character ranges that cover the text. It is absent for a short text and for several texts."""
    tiny.bundle(tmp_path, "names", task="token-classification")
    text = "good film " * 40
    windows = [tuple(map(int, part.split("-"))) for part in windows_header(tmp_path, text).split(", ")]
    assert (windows[0][0], windows[-1][1]) == (0, len(text) - 1)
    assert [left[0] < right[0] < left[1] for left, right in pairwise(windows)] == [True] * (len(windows) - 1)
    assert windows_header(tmp_path, "good film") == ""
    assert windows_header(tmp_path, [text, text]) == ""
    assert windows_header(tmp_path, [text]) == windows_header(tmp_path, text)
    many = windows_header(tmp_path, text * 10, stride=20).split(", ")
    assert len(many) == 65
    assert many[-1] == "..."


def windows_header(models: Path, inputs: Any, **parameters: Any) -> str:
    response = call(models, "POST", "/ner", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200
    return str(response.headers.get("x-windows", ""))
