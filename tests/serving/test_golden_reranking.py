"""Reranking equals the reference: stored logits decode to the order and scores of PyTorch, and the included bundle agrees.

`tests/golden/make_reranking.py` wrote the file of cases; these tests need no checkpoint.
"""

from typing import Any

import numpy as np
import pytest

from bertserve.service.tasks import rerank
from golden import cases
from support.bundles import STEPS, included
from support.fakes import Head
from support.task_runs import decode, encode

CASES = cases.load_cases("reranking")
RERANK = included("rerank")
NEAR_TIE = 0.1
FLOOR = 0.98
MAX_SCORE_ERROR = 0.05


def request_of(case: dict[str, Any]) -> rerank.RerankInput:
    """Returns the task request of a case, parsed from JSON as in the service."""
    [request] = RERANK.parse(case["request"], rerank.TASK).task_inputs(RERANK.manifest)
    return request


def sigmoid(logits: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return 1 / (1 + np.exp(-np.array(logits, dtype=np.float64)))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_answer(case: dict[str, Any]) -> None:
    """Order and texts are equal; scores agree to 1e-6."""
    if not case["logits"]:
        assert case["answer"] == []
        return
    rows = [{"logits": np.array([logit], dtype=np.float32)} for logit in case["logits"]]
    answer = decode(rerank, request_of(case), rows, Head(("LABEL_0",)))

    assert answer == [item | {"score": pytest.approx(item["score"], abs=1e-6)} for item in case["answer"]]


@pytest.mark.parametrize("step", STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int) -> None:
    """Two texts of a query whose scores differ by 0.1 or more have the same order as in float32."""
    pairs = matches = 0
    worst = 0.0
    for case in CASES[::step]:
        if not case["logits"]:
            continue
        rows = RERANK.rows(encode(rerank, request_of(case), RERANK.tokenizer, RERANK.manifest).encodings)
        expected, actual = sigmoid(case["logits"]), sigmoid([float(row["logits"][0]) for row in rows])
        worst = max(worst, float(np.abs(expected - actual).max()))
        first, second = np.nonzero(np.subtract.outer(expected, expected) >= NEAR_TIE)
        pairs, matches = pairs + len(first), matches + int((actual[first] > actual[second]).sum())
    print(f"\nembedded rerank bundle: {matches} of {pairs} pairs of texts in the order of fp32; largest difference of a score {worst:.3f}")

    assert matches / pairs >= FLOOR
    assert worst <= MAX_SCORE_ERROR
