"""For every task, a row in a batch of mixed lengths equals the row from a batch of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bertserve.service.tasks import attention, classify, fill_mask, multiple_choice, question_answering, token_classification
from embedded import load_from
from task_runs import encode

LONG = "the film was not very good , but the book is great ! " * 4
REQUESTS: dict[str, tuple[Any, list[Any]]] = {
    classify.TASK: (
        classify,
        [
            *map(classify.ClassifyRequest, ["", "good", LONG, "a 看 film"]),
            classify.ClassifyRequest("a", LONG),
            classify.ClassifyRequest(LONG, parameters=classify.ClassifyParameters(window="max")),
        ],
    ),
    token_classification.TASK: (
        token_classification,
        [
            *map(token_classification.NerRequest, ["good", LONG, "", "a 看 film", LONG[:60]]),
            token_classification.NerRequest(LONG, token_classification.NerParameters(stride=3)),
        ],
    ),
    question_answering.TASK: (
        question_answering,
        [
            question_answering.AnswerRequest("good?", "a good film"),
            question_answering.AnswerRequest("which one is good?", LONG),
            question_answering.AnswerRequest("a", "b"),
            question_answering.AnswerRequest("a", LONG, question_answering.AnswerParameters(max_seq_len=16, doc_stride=2)),
        ],
    ),
    fill_mask.TASK: (
        fill_mask,
        [
            fill_mask.FillMaskRequest("a [MASK] film"),
            fill_mask.FillMaskRequest("[MASK]" * 20),
            fill_mask.FillMaskRequest(f"{LONG} [MASK] [MASK] {LONG} [MASK]"),
            fill_mask.FillMaskRequest("[MASK] , [MASK]"),
            fill_mask.FillMaskRequest("the book was very [MASK] [MASK] [MASK] !"),
        ],
    ),
    multiple_choice.TASK: (
        multiple_choice,
        [
            multiple_choice.ChooseRequest("a", ("good", "film", "")),
            multiple_choice.ChooseRequest("which one is good?", ("the film", LONG), "the book is great !"),
            multiple_choice.ChooseRequest(LONG, ("good", "bad")),
        ],
    ),
    attention.TASK: (
        attention,
        [
            attention.AttentionRequest("a good film", layers=((0, (0, 1)), (1, (0, 1, 2)))),
            attention.AttentionRequest("good", layers=((1, (2,)),)),
            attention.AttentionRequest("the book was dull", "a film", ((1, (0,)), (0, (0,)))),
        ],
    ),
}


def assert_equal_rows(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    """Asserts that both lists of rows have the same outputs and shapes, within 1e-5."""
    assert [{name: value.shape for name, value in row.items()} for row in expected] == [
        {name: value.shape for name, value in row.items()} for row in actual
    ]
    for a, b in zip(expected, actual, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", REQUESTS)
def test_a_row_in_a_batch_equals_the_row_alone(tmp_path: Path, task: str, side: str) -> None:
    """Each row of one large batch equals the row from a batch of its own, also in reverse order. The batch needs padding."""
    heads = (2, 3) if task == attention.TASK else ()
    path = tiny.bundle(tmp_path, task=classify.TASK if heads else task, attention_heads=heads)
    model = load_from(tiny.edit(path, lambda fields: fields["tokenizer"].update(padding_side=side)))
    module, requests = REQUESTS[task]
    encodings = [each for request in requests for each in encode(module, request, model.tokenizer, model.manifest).encodings]
    assert len({len(encoding) for encoding in encodings}) > 2
    assert (task == fill_mask.TASK) == (len({len(encoding.masks) for encoding in encodings}) > 2)
    assert (task == attention.TASK) == (len({encoding.maps for encoding in encodings}) > 2)
    alone = model.rows(encodings)

    assert_equal_rows(alone, model.engine.run(encodings))
    assert_equal_rows(alone[::-1], model.engine.run(encodings[::-1]))
