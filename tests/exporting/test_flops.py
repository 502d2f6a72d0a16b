"""Floating-point operations of a text: counts from runs of the model, compared with formulas and with longer texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bertserve.export.checkpoint import checkpoint
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.service.bundle.graph_spec import InputSpec
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


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_terms_predict_the_operations_of_longer_texts(tmp_path: Path, family: str) -> None:
    task = next(task for name, task in CASES if name == family)
    loaded, linear, quadratic = counted(tmp_path, family, task)
    short, long = (checkpoint._count_operations(loaded.model, loaded.inputs, loaded.example_ids(length)) for length in (24, LENGTH))

    assert long - short == pytest.approx(linear * (LENGTH - 24) + quadratic * (LENGTH**2 - 24**2), rel=1e-9)


@pytest.mark.parametrize(
    ("lengths", "counts", "expected"),
    [
        ([32, 64, 128], [7 + 5 * n + 3 * n**2 for n in (32, 64, 128)], (5.0, 3.0)),
        ([1, 2, 3], [10, 20, 30], (10.0, 0.0)),
        ([1, 2, 4], [10, 20, 30], (20 / 3, 0.0)),  # growth slows down: the slope from first to last
        ([1, 2, 3], [10, 10, 10], (1.0, 0.0)),  # no growth: the manifest needs a positive term
    ],
)
def test_terms_are_fitted_through_three_points(lengths: list[int], counts: list[int], expected: tuple[float, float]) -> None:
    found = checkpoint.fit_terms(lengths, counts)

    assert expected == (pytest.approx(found.linear), pytest.approx(found.quadratic))


def test_counting_does_not_change_the_model(tmp_path: Path) -> None:
    loaded, *_ = counted(tmp_path, "BERT", "fill-mask")
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.ones(1, 7, dtype=torch.int64))["logits"]

    assert (1, 7, loaded.model.config.vocab_size) == tuple(logits.shape)


def test_counting_stays_within_a_short_maximum_length() -> None:
    config = transformers.BertConfig(vocab_size=8, max_position_embeddings=5, attn_implementation="eager", **SIZES)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    found = checkpoint.count_flops(model, [InputSpec(name="input_ids", fill="token_ids")], lambda length: [1] * length, max_length=5)

    assert (LAYERS * LINEAR, LAYERS * QUADRATIC) == (found.linear, found.quadratic)
