"""The wire format of /ner, /answer and /fill-mask on tiny bundles: shapes, parameters, errors and long texts."""

import re
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.models.request_progress import Prediction
from support import tiny
from support.app_client import LONG, Send, assert_same, call, call_once, error_of, error_of_inputs, post, result_of, state_of

NER, ANSWER, FILL = "/ner", "/answer", "/fill-mask"
QUESTION = {"question": "good?", "context": "a great film and a dull book"}
INPUTS: dict[str, Any] = {"/classify": "good", NER: "a good film was bad", ANSWER: QUESTION, FILL: "a [MASK] film"}
ROOM = 30  # maximum text tokens of a tiny bundle


@pytest.mark.parametrize("text", ["", " \r\n\t", "\u200b"])
def test_a_text_without_tokens_has_no_entities(api: Send, text: str) -> None:
    assert result_of(api, NER, text) == []
    assert_same(result_of(api, NER, [text, "good", text]), [[], result_of(api, NER, "good"), []])


@pytest.mark.parametrize(
    ("inputs", "place"),
    [
        ({"question": "", "context": "good"}, "inputs: `question`"),
        ({"question": "good?", "context": ""}, "inputs: `context`"),
        ({"question": " \n", "context": "good"}, "inputs: `question`"),
        ([QUESTION, {"question": "good?", "context": "\t"}], "inputs[1]: `context`"),
    ],
)
def test_an_empty_question_or_passage_is_an_error(api: Send, inputs: Any, place: str) -> None:
    assert error_of_inputs(api, ANSWER, inputs).startswith(place)


def test_a_stride_as_long_as_the_window_is_refused_with_the_numbers(api: Send) -> None:
    """A stride of at least one window is an error if a text needs windows; otherwise it has no effect."""
    message = error_of_inputs(api, NER, ["good", LONG], stride=ROOM)
    assert re.findall(r"\d+", message) == ["1", "30", "30"]
    assert "first text" not in message
    assert_same(result_of(api, NER, "good", stride=ROOM), result_of(api, NER, "good"))


@pytest.mark.parametrize(
    ("question", "parameters", "numbers"),
    [
        (20, {"doc_stride": 16}, [1, 16, 9]),
        (5, {"doc_stride": 24}, [1, 24, 24]),
        (40, {"doc_stride": 0}, [1, 60]),
        (5, {"max_seq_len": 10, "doc_stride": 3}, [1, 3, 2]),
        (5, {"max_seq_len": 1}, [0, 60]),
    ],
)
def test_a_window_without_passage_tokens_is_refused(api: Send, question: int, parameters: dict[str, Any], numbers: list[int]) -> None:
    """The error has the index of the input, and the stride with the tokens left for the passage, or the tokens of the passage if none fits."""
    fitting = [{"question": "who?", "context": "x y z"}] * numbers[0]
    message = error_of_inputs(api, ANSWER, [*fitting, {"question": " ".join(["good"] * question), "context": LONG}], **parameters)
    assert [int(number) for number in re.findall(r"\d+", message)] == numbers


def test_the_default_stride_fits_into_the_tokens_that_the_question_leaves(api: Send) -> None:
    inputs = {"question": " ".join(["good"] * 20), "context": LONG}
    assert_same(result_of(api, ANSWER, inputs), result_of(api, ANSWER, inputs, doc_stride=4))


def test_a_window_over_the_models_length_is_an_error(api: Send) -> None:
    assert_same(result_of(api, ANSWER, QUESTION, max_seq_len=32), result_of(api, ANSWER, QUESTION))
    for length in (33, 384):
        assert f"`max_seq_len` is {length} " in error_of_inputs(api, ANSWER, QUESTION, max_seq_len=length)


@pytest.mark.parametrize("path", [ANSWER, FILL])
def test_top_k_has_a_limit_that_the_operator_sets(api: Send, path: str, tmp_path: Path) -> None:
    """It counts before the limit of the field, which no setting can raise."""
    tiny.every_kind(tmp_path)
    settings = {"max_top_k": 7, "allow_implicit_default": True}
    body = {"inputs": INPUTS[path], "parameters": {"top_k": 8}}
    assert "`top_k` is 8 and 7 " in error_of(call(tmp_path, "POST", path, json=body, settings=settings), 413, "too_large")
    assert "`parameters.top_k`" in error_of_inputs(api, path, INPUTS[path], top_k=1001)


def test_the_warning_is_a_valid_header_for_any_target(api: Send) -> None:
    targets = ["日本", "\U0001f600", "é\r\nx-evil: 1", *(f"z{i}" for i in range(500))]
    response = post(api, {"inputs": INPUTS[FILL], "parameters": {"targets": targets}}, path=FILL)
    assert response.status_code == 200
    assert response.headers["x-hf-warning"].isascii()
    assert len(response.headers["x-hf-warning"]) < 300
    assert "x-evil" not in response.headers


def test_headers_have_printable_ascii_only(models: Path) -> None:
    """A newline or a non-Latin letter in a vocabulary's piece is escaped, so that it cannot end or break a header line."""
    service, warning = state_of(models), "targets; the first pieces were used: \n\r\x00\x7f, é, 日, \U0001f600, a\\b"

    async def predict(*_: Any, **__: Any) -> Prediction:
        return Prediction([[]], [], [(0, warning)])

    service.registry.get("tiny").predict = predict
    answer = call_once(service, "POST", "/classify", json={"inputs": "good"})
    assert answer.headers["x-hf-warning"] == r"targets; the first pieces were used: \n\r\x00\x7f, \xe9, \u65e5, \U0001f600, a\\b"


def test_targets_without_a_token_of_their_own_get_a_warning(api: Send) -> None:
    """A target outside the vocabulary is replaced by its first token. The warnings count both kinds."""
    response = post(api, {"inputs": INPUTS[FILL], "parameters": {"targets": ["", "good", "\u200b", "zebra"]}}, path=FILL)
    assert {item["token_str"] for item in response.json()} == {"z", "good"}
    unknown, without_tokens = response.headers.get_list("x-hf-warning")
    assert unknown.startswith("targets; 1 of 4 ")
    assert unknown.endswith(": z")
    assert without_tokens.startswith("targets; 2 of 4 ")


def test_the_mask_as_a_candidate_is_not_in_the_sequence(api: Send) -> None:
    """The pipeline leaves out special tokens if a text has one mask, and the mask is special."""
    [item] = result_of(api, FILL, INPUTS[FILL], targets=["[MASK]"])
    assert (item["token_str"], item["sequence"]) == ("[MASK]", "a film")


@pytest.mark.parametrize("text", ["", "a film", "a [mask] film", "a <mask> film", "a [ MASK ] film"])
def test_a_misspelled_mask_is_refused_with_the_correct_mask(api: Send, text: str) -> None:
    message = error_of_inputs(api, FILL, ["a [MASK] film", text])
    assert message.startswith("inputs[1]: ")
    assert "`[MASK]`" in message


def test_masks_have_a_limit(api: Send) -> None:
    assert [len(fills) for fills in result_of(api, FILL, "[MASK]" * 64, top_k=1)] == [1] * 64
    assert "65 masks and 64 " in error_of_inputs(api, FILL, "[MASK] " * 65)
