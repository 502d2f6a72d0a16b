"""Encoding and decoding of text classification on plain numbers, compared with brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import classify
from bertserve.service.tasks.decoding import activate
from bertserve.service.text.tokenizer import Tokenizer
from fakes import Head
from task_runs import decode, encode

FLOATS = st.floats(-1e4, 1e4, width=32)
WINDOWS = st.integers(1, 6).flatmap(lambda labels: st.lists(st.lists(FLOATS, min_size=labels, max_size=labels), min_size=1, max_size=5))


def brute_force(logits: list[float], activation: str) -> list[float]:
    if activation == "none":
        return logits
    if activation == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in logits]
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


@given(WINDOWS, st.sampled_from(["softmax", "sigmoid", "none"]), st.sampled_from(["mean", "max"]), st.sampled_from([None, 1, 2, 9]))
def test_decode_equals_brute_force(logits: list[list[float]], activation: str, window: str, top_k: int | None) -> None:
    """For any logits, the scores, their combination over windows, their order and `top_k` equal a plain computation."""
    labels = [f"label-{i}" for i in range(len(logits[0]))]
    scores = [brute_force(row, activation) for row in logits]
    combine = max if window == "max" else lambda column: sum(column) / len(column)
    expected = [combine(column) for column in zip(*scores, strict=True)]
    request = classify.ClassifyRequest("", parameters=classify.ClassifyParameters(window=window, function_to_apply=activation, top_k=top_k))  # type: ignore[arg-type]
    rows = [{"logits": np.array(row, dtype=np.float32)} for row in logits]
    actual = decode(classify, request, rows, Head(tuple(labels)))

    assert min(len(labels), top_k or len(labels)) == len(actual)
    assert all(math.isfinite(item["score"]) for item in actual)
    assert sorted((item["score"] for item in actual), reverse=True) == [item["score"] for item in actual]
    tolerance = 1e-6 if activation != "none" else 1e-2
    assert [pytest.approx(expected[labels.index(item["label"])], rel=1e-5, abs=tolerance) for item in actual] == [
        i["score"] for i in actual
    ]
    assert pytest.approx(sorted(expected, reverse=True)[: len(actual)], rel=1e-5, abs=tolerance) == [item["score"] for item in actual]


def test_equal_scores_keep_the_order_of_the_labels() -> None:
    rows = [{"logits": np.array([1.0, 2.0, 1.0, 2.0], dtype=np.float32)}]

    assert list("bdac") == [item["label"] for item in decode(classify, classify.ClassifyRequest(""), rows, Head(tuple("abcd")))]


def test_the_models_own_activation_is_the_default() -> None:
    """Without `function_to_apply`, a multi-label model applies a sigmoid to each label."""
    rows = [{"logits": np.array([0.0, 0.0], dtype=np.float32)}]

    assert [0.5, 0.5] == [item["score"] for item in decode(classify, classify.ClassifyRequest(""), rows, Head(("a", "b"), "sigmoid"))]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=8), st.sampled_from(["softmax", "sigmoid"])
)
def test_scores_are_finite_for_every_logit(logits: list[float], activation: str) -> None:
    """The maximum is subtracted, so that no exponential overflows: scores are probabilities for any logits."""
    with np.errstate(over="ignore"):
        scores = activate(np.array(logits, dtype=np.float32), activation)  # type: ignore[arg-type]

    assert np.float32 == scores.dtype
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize(
    ("request_", "kept", "truncated"),
    [
        (classify.ClassifyRequest("good " * 30), 32, False),
        (classify.ClassifyRequest("good " * 31), 32, True),
        (classify.ClassifyRequest("good " * 20, "bad " * 9), 32, False),
        (classify.ClassifyRequest("good " * 20, "bad " * 10), 32, True),
        (classify.ClassifyRequest("good " * 5, ""), 7, False),
        (classify.ClassifyRequest("", "bad"), 4, False),
    ],
)
def test_a_text_over_the_limit_is_truncated_and_reported(
    tokenizer: Tokenizer, request_: classify.ClassifyRequest, kept: int, truncated: bool
) -> None:
    encoded = encode(classify, request_, tokenizer)

    assert ([kept], truncated) == ([len(encoding) for encoding in encoded.encodings], encoded.truncated)


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (classify.ClassifyRequest("good " * 40, parameters=classify.ClassifyParameters(window="mean", stride=30)), " 30, .* 30 tokens;"),
        (
            classify.ClassifyRequest("film " * 25, "bad " * 30, classify.ClassifyParameters(window="mean", stride=4)),
            " 4, .* 4 tokens;",
        ),
        (classify.ClassifyRequest("film " * 40, "bad", classify.ClassifyParameters(window="mean", stride=0)), " 0, .* 0 tokens;"),
    ],
)
def test_windows_without_tokens_of_the_text_are_an_error(tokenizer: Tokenizer, request_: classify.ClassifyRequest, numbers: str) -> None:
    with pytest.raises(InvalidValueError, match=numbers):
        encode(classify, request_, tokenizer)
