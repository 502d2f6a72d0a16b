"""Encoding and decoding of text classification on plain numbers, compared with brute force."""

from __future__ import annotations

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
