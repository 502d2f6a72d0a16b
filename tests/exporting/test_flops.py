"""Floating-point operations of a text: counts from runs of the model, compared with formulas and with longer texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from families import CASES, FAMILIES, LENGTH, SIZES

pytestmark = pytest.mark.torch

HIDDEN, LAYERS, INNER = (SIZES[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size"))
# per layer: four matrices of attention and two of the feed-forward block; attention scores and weighted values
LINEAR, QUADRATIC = 2 * (4 * HIDDEN**2 + 2 * HIDDEN * INNER), 4 * HIDDEN


def counted(path: Path, family: str, task: str) -> tuple[Checkpoint, float, float]:
    """Returns a family's random checkpoint and the two terms of its operation count."""
    loaded = load_checkpoint(str(FAMILIES[family].save(path / "model", task)), task=task)
    return loaded, loaded.flops.linear, loaded.flops.quadratic


@pytest.mark.parametrize(
    ("family", "task", "linear", "quadratic"),
    [
        # the pooler and the labels read only [CLS], so they do not grow with the text
        ("BERT", "text-classification", LAYERS * LINEAR, LAYERS * QUADRATIC),
        ("BERT", "token-classification", LAYERS * LINEAR + 2 * HIDDEN * 5, LAYERS * QUADRATIC),
        ("BERT", "question-answering", LAYERS * LINEAR + 2 * HIDDEN * 2, LAYERS * QUADRATIC),
        ("BERT", "multiple-choice", LAYERS * LINEAR, LAYERS * QUADRATIC),
        # the projection to the vocabulary does not grow either, because it runs only for masks
        ("BERT", "fill-mask", LAYERS * LINEAR, LAYERS * QUADRATIC),
        # one layer runs three times, after a factorized embedding
        ("ALBERT", "text-classification", 3 * LINEAR + 2 * 16 * HIDDEN, 3 * QUADRATIC),
        # no linear layers; twice as many relative positions as tokens are projected and scored, and half of the scores are kept
        ("XLNet", "text-classification", LAYERS * (LINEAR + 2 * 2 * HIDDEN**2), LAYERS * (QUADRATIC + 2 * 2 * HIDDEN)),
    ],
)
def test_the_terms_match_the_formulas_of_the_layers(tmp_path: Path, family: str, task: str, linear: float, quadratic: float) -> None:
    _, *found = counted(tmp_path, family, task)

    assert [linear, quadratic] == found


@pytest.mark.parametrize(
    "family",
    [family if family in ("DeBERTa", "DeBERTa v3", "XLNet") else pytest.param(family, marks=pytest.mark.full_grid) for family in FAMILIES],
)
def test_the_terms_predict_the_operations_of_longer_texts(tmp_path: Path, family: str) -> None:
    task = next(task for name, task in CASES if name == family)
    loaded, linear, quadratic = counted(tmp_path, family, task)
    short, long = map(loaded.count_operations, (24, LENGTH))

    assert long - short == pytest.approx(linear * (LENGTH - 24) + quadratic * (LENGTH**2 - 24**2), rel=1e-9)
