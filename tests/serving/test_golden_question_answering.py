"""Question answering equals transformers 5.2.0, the last release with this pipeline: stored logits decode to its answers.

Deliberate differences: the pipeline adds spans of score 0 outside the passage, which are dropped here. If several answers were
requested and one was found, it returns a dict; here the result is a list. By default equal texts keep their best score and every
span is searched: tests/serving/test_decoders.py compares that with loops over all spans.
"""

from typing import Any

import numpy as np
import pytest

from bertserve.service.tasks import question_answering
from bertserve.service.tasks.step import TextInput
from golden import cases
from support.bundles import STEPS, included

CASES = cases.load_cases("question_answering")
QA = included("qa")
FLOOR = 0.9


def windows_and_rows(
    request: TextInput[question_answering.QuestionAnsweringParameters], windows: list[dict[str, Any]]
) -> tuple[question_answering.PassageWindows, list[dict[str, Any]]]:
    """Returns the windows of a request and the stored rows, after a check that the windows equal the reference's."""
    windows_ = question_answering.cut_passage(request, QA.tokenizer)
    assert [(part.start, len(part), encoding.start) for part, encoding in zip(windows_.token_ranges, windows_.encodings, strict=True)] == [
        (w["first"], w["count"], w["question"] + 2) for w in windows
    ]
    rows = [{f"{name}_logits": np.array(w[name], dtype=np.float32) for name in ("start", "end")} for w in windows]
    return windows_, rows


def as_list(result: Any) -> list[dict[str, Any]]:
    return [item for item in (result if isinstance(result, list) else [result]) if item["score"] > 0]


def pairs(
    case: dict[str, Any], **changes: Any
) -> list[tuple[TextInput[question_answering.QuestionAnsweringParameters], list[dict[str, Any]], Any]]:
    parameters = case["request"].get("parameters", {}) | changes
    parameters.pop("max_question_len", None)  # a parameter of the reference, which changes no answer of these cases
    body = QA.parse(case["request"] | {"parameters": parameters})
    answers = case["answer"] if body.is_list else [case["answer"]]
    return list(zip(body.task_inputs(QA.manifest), case["windows"], answers, strict=True))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_answers(case: dict[str, Any]) -> None:
    """With `duplicates: "sum"`, answers, offsets and order are equal (equal scores in any order); scores agree to 1e-6."""
    for request, windows, expected in pairs(case, duplicates="sum"):
        _, rows = windows_and_rows(request, windows)
        result = QA.decode(request, rows)
        assert (request.parameters.top_k > 1) == isinstance(result, list)
        actual, right = as_list(result), as_list(expected)
        assert [item["score"] for item in actual] == [pytest.approx(item["score"], abs=1e-6) for item in right]
        for score in {item["score"] for item in right}:
            same = [{(a["answer"], a["start"], a["end"]) for a in side if abs(a["score"] - score) < 1e-6} for side in (right, actual)]
            assert same[1] == same[0]


@pytest.mark.parametrize("step", STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int) -> None:
    """The best answers of the served graph and of float32 overlap with a mean F1 of at least 0.9, without near ties."""
    total, count = 0.0, 0
    for case in CASES[::step]:
        for request, windows, _ in pairs(case, duplicates="best", top_k=2, handle_impossible_answer=False):
            windows_, rows = windows_and_rows(request, windows)
            expected = QA.decode(request, rows)
            answer = QA.decode(request, QA.rows(windows_.encodings))
            if len(expected) > 1 and expected[0]["score"] < expected[1]["score"] + 0.1:
                continue
            (a, b), (c, d) = ((side[0]["start"], side[0]["end"]) for side in (expected, answer))
            total, count = total + 2 * max(0, min(b, d) - max(a, c)) / max(1, b - a + d - c), count + 1
    print(f"\nembedded qa bundle: answer F1 against fp32 {total / count:.4f} over {count} questions")

    assert total / count >= FLOOR
