"""For every task, a row in a batch of mixed lengths equals the row from a batch of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tiny
from bertserve.service.bundle import files
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.tasks import classify, fill_mask, multiple_choice, question_answering, token_classification
from bertserve.service.text.tokenizer import Encoding, Tokenizer
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
}
CASES = [(task, side) for task in REQUESTS for side in ("left", "right")]


class Served:
    """A tiny bundle of a task, padded on one side, and the encodings of the task's requests."""

    def __init__(self, folder: Path, task: str, side: Literal["left", "right"]) -> None:
        path = tiny.bundle(folder, task=task)
        loaded = files.load_bundle(path)
        graph = loaded.manifest.graphs[0]
        self.engine = OnnxEngine(path / graph.file, graph, pad_id=0, padding_side=side)
        self.manifest = loaded.manifest
        self.task, self.requests = REQUESTS[task]
        self.tokenizer = Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)
        self.batches = [encode(self.task, request, self.tokenizer, self.manifest) for request in self.requests]
        self.encodings: list[Encoding] = [encoding for batch in self.batches for encoding in batch.encodings]


@pytest.fixture(name="served", params=CASES, ids=["-".join(case) for case in CASES])
def served_bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    return Served(tmp_path, *request.param)


def assert_equal_rows(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    """Asserts that both lists of rows have the same outputs and shapes, within 1e-5."""
    assert [{name: value.shape for name, value in row.items()} for row in expected] == [
        {name: value.shape for name, value in row.items()} for row in actual
    ]
    for a, b in zip(expected, actual, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-5)


def test_a_row_in_a_batch_equals_the_row_alone(served: Served) -> None:
    """Each row of one large batch equals the row from a batch of its own, also in reverse order. The batch needs padding."""
    assert len({len(encoding) for encoding in served.encodings}) > 2
    assert (served.task is fill_mask) == (len({len(encoding.masks) for encoding in served.encodings}) > 2)
    alone = [served.engine.run([encoding])[0] for encoding in served.encodings]

    assert_equal_rows(alone, served.engine.run(served.encodings))
    assert_equal_rows(alone[::-1], served.engine.run(served.encodings[::-1]))
