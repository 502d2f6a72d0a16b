"""Answers equal those of transformers 5.2.0, the last with the pipeline: stored logits decode to what it gave.

Deliberate differences: the pipeline fills up with spans of score 0 that are no spans of the passage (dropped here); and it
gives a dict where one answer was found although several were asked for (a list here). By default equal texts keep their
best score and every span is searched: compared with brute force below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import embedded
from bertserve.service.tasks import question_answering
from golden import cases
from task_runs import decode

CASES = cases.read("question_answering")
QA = embedded.load("qa")
FLOOR = 0.9


def stored(
    request: question_answering.Request, windows: list[dict[str, Any]]
) -> tuple[question_answering.PassageWindows, list[dict[str, Any]]]:
    """Returns what the model reads of a request and the stored rows, having checked that the windows are the reference's."""
    read = question_answering.windows_of(request, QA.tokenizer)
    assert [(w["first"], w["count"], w["question"] + 2) for w in windows] == [
        (cut.start, len(cut), encoding.start) for cut, encoding in zip(read.cuts, read.encodings, strict=True)
    ]
    rows = [{f"{name}_logits": np.array(w[name], dtype=np.float32) for name in ("start", "end")} for w in windows]
    return read, rows


def listed(result: Any) -> list[dict[str, Any]]:
    """Returns answers as a list, without the reference's fillers."""
    return [item for item in (result if isinstance(result, list) else [result]) if item["score"] > 0]


def pairs(case: dict[str, Any], **changes: Any) -> list[tuple[question_answering.Request, list[dict[str, Any]], Any]]:
    """Returns each input's request, windows and reference answer."""
    parameters = case["request"].get("parameters", {}) | changes
    body = embedded.read(question_answering.TASK, case["request"] | {"parameters": parameters})
    answers = case["answer"] if body.is_list else [case["answer"]]
    return list(zip(body.requests(), case["windows"], answers, strict=True))


def test_there_are_enough_cases() -> None:
    """At least 200 requests, a good part of them with several windows."""
    assert len(CASES) >= 200
    assert len([case for case in CASES if any(len(windows) > 1 for windows in case["windows"])]) >= 50


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_answers(case: dict[str, Any]) -> None:
    """With `duplicates: "sum"` answers, offsets and order exactly (equal scores as sets), scores to 1e-6."""
    for request, windows, expected in pairs(case, duplicates="sum"):
        _, rows = stored(request, windows)
        result = decode(question_answering, request, rows, QA.manifest, QA.tokenizer)
        assert isinstance(result, list) == (request.parameters.top_k > 1)
        actual, wanted = listed(result), listed(expected)
        assert [pytest.approx(item["score"], abs=1e-6) for item in wanted] == [item["score"] for item in actual]
        for score in {item["score"] for item in wanted}:
            same = [{(a["answer"], a["start"], a["end"]) for a in side if abs(a["score"] - score) < 1e-6} for side in (wanted, actual)]
            assert same[0] == same[1]


def brute_force(
    request: question_answering.Request, read: question_answering.PassageWindows, rows: list[dict[str, Any]]
) -> list[tuple[float, int, int, str]]:
    """Returns every distinct answer with its best score, by the plain definition: loops over windows, starts and ends."""
    offsets, words = read.passage.spans(request.context), read.passage.word_ids
    found: dict[str, tuple[float, int, int, str]] = {}
    for encoding, cut, row in zip(read.encodings, read.cuts, rows, strict=True):
        allowed = [0, *range(encoding.start, encoding.start + len(cut))]
        p = []
        for name in ("start_logits", "end_logits"):
            exps = np.exp(row[name][allowed].astype(np.float64) - row[name][allowed].max())
            p.append(exps / exps.sum())
        for s in range(len(cut)):
            for e in range(s, min(s + request.parameters.max_answer_len, len(cut))):
                first, last = cut.start + s, cut.start + e
                while request.parameters.align_to_words and first > 0 and words[first - 1] == words[first]:
                    first -= 1
                while request.parameters.align_to_words and last + 1 < len(words) and words[last + 1] == words[last]:
                    last += 1
                span = (offsets[first][0], offsets[last][1])
                text, score = request.context[slice(*span)], float(p[0][s + 1] * p[1][e + 1])
                if score > found.get(text.lower(), (-1.0,))[0]:
                    found[text.lower()] = (score, *span, text)
    return sorted(found.values(), key=lambda item: -item[0])


@pytest.mark.parametrize("case", CASES[::3], ids=[case["id"] for case in CASES[::3]])
def test_by_default_every_span_is_searched_and_equal_texts_keep_their_best(case: dict[str, Any]) -> None:
    """The best scores are those of brute force over all spans, stay within [0, 1], and no text comes twice."""
    for request, windows, _ in pairs(case, duplicates="best", handle_impossible_answer=False):
        read, rows = stored(request, windows)
        result = decode(question_answering, request, rows, QA.manifest, QA.tokenizer)
        actual = result if isinstance(result, list) else [result]
        expected = brute_force(request, read, rows)[: request.parameters.top_k]
        assert [pytest.approx(item[0], abs=1e-6) for item in expected] == [item["score"] for item in actual]
        assert len(actual) == len({item["answer"].lower() for item in actual})
        assert all(0 <= item["score"] <= 1 for item in actual)
        clear = [
            i for i in range(len(expected)) if all(abs(expected[i][0] - other[0]) > 1e-6 for j, other in enumerate(expected) if i != j)
        ]
        assert [expected[i][3].lower() for i in clear] == [actual[i]["answer"].lower() for i in clear]


@pytest.mark.parametrize("step", embedded.STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of the served graph against those of float32, where that is sure: mean F1 of their characters' overlap."""
    total, count = 0.0, 0
    for case in CASES[::step]:
        for request, windows, _ in pairs(case, duplicates="best", top_k=2, handle_impossible_answer=False):
            read, rows = stored(request, windows)
            expected = decode(question_answering, request, rows, QA.manifest, QA.tokenizer)
            served = decode(question_answering, request, QA.rows(read.encodings), QA.manifest, QA.tokenizer)
            assert isinstance(expected, list)
            assert isinstance(served, list)
            if len(expected) > 1 and expected[0]["score"] < expected[1]["score"] + 0.1:
                continue
            (a, b), (c, d) = ((side[0]["start"], side[0]["end"]) for side in (expected, served))
            total, count = total + 2 * max(0, min(b, d) - max(a, c)) / max(1, b - a + d - c), count + 1
    with capsys.disabled():
        print(f"\nembedded qa bundle: answer F1 against fp32 {total / count:.4f} over {count} questions")

    assert total / count >= FLOOR
