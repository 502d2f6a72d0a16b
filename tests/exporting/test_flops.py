"""Floating-point operations of a text: the two terms of their number, which runs of the model give."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertserve.export.checkpoint.load import load_checkpoint
from families import CASES, FAMILIES, LENGTH

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("family", "task", "linear", "quadratic"),
    [
        # the pooler and the labels of a text read only [CLS], and the vocabulary is only for masks, so they do not grow with the text
        *(("BERT", task, 32768, 256) for task in ("text-classification", "multiple-choice", "fill-mask")),
        ("BERT", "token-classification", 32768 + 320, 256),
        ("BERT", "question-answering", 32768 + 128, 256),
        # one layer runs three times, after a factorized embedding
        ("ALBERT", "text-classification", 50176, 384),
        # no linear layers; twice as many relative positions as tokens are projected and scored, and half of the scores are kept
        ("XLNet", "text-classification", 40960, 512),
    ],
)
def test_only_layers_that_grow_with_the_text_count(tmp_path: Path, family: str, task: str, linear: int, quadratic: int) -> None:
    flops = load_checkpoint(str(FAMILIES[family].save(tmp_path / "model", task)), task=task).flops

    assert (linear, quadratic) == (flops.linear, flops.quadratic)


@pytest.mark.parametrize(
    "family",
    [family if family in ("DeBERTa", "DeBERTa v3", "XLNet") else pytest.param(family, marks=pytest.mark.full_grid) for family in FAMILIES],
)
def test_the_terms_predict_the_operations_of_longer_texts(tmp_path: Path, family: str) -> None:
    task = next(task for name, task in CASES if name == family)
    loaded = load_checkpoint(str(FAMILIES[family].save(tmp_path / "model", task)), task=task)
    more = loaded.flops.linear * (LENGTH - 24) + loaded.flops.quadratic * (LENGTH**2 - 24**2)

    assert pytest.approx(more, rel=1e-9) == loaded.count_operations(LENGTH) - loaded.count_operations(24)
