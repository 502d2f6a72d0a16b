"""The tasks of GLUE in their original format: `verify` has the metrics that GLUE uses.

A multi-label model is also tested. The expected metrics are from scipy and scikit-learn, for the outputs of transformers.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

from bundles import Verify, exported, json_lines
from checkpoints import PyTorch, bert

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)

POSITIONS = 64
SIZES = {"positions": POSITIONS, "model_max_length": POSITIONS, "rows": 128}
TEXTS = [f"{a} {b} {c}" for a, b, c in product(("the film", "a book"), ("was very", "is not"), ("good .", "bad !", "great , but long"))]
OTHERS = [*TEXTS[5:], *TEXTS[:5]]


VALUE = ("LABEL_0",)
# columns of the data, and labels in the order of their ids; RTE and WNLI have the columns of MRPC
GLUE = {
    "CoLA": (("sentence",), ("unacceptable", "acceptable")),
    "MRPC": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "QQP": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "STS-B": (("sentence1", "sentence2"), VALUE),
    "MNLI": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "QNLI": (("question", "sentence"), ("entailment", "not_entailment")),
}
# `make test` runs these: a pair with a value, and a pair with three labels; the others have two labels
EACH_FORM = ("STS-B", "MNLI")


class Exported:
    """A random checkpoint of a task, its bundle, and transformers' logits for `TEXTS`."""

    def __init__(self, folder: Path, labels: tuple[str, ...], problem_type: str, *, pair: bool) -> None:
        self.source = bert(folder, labels=labels, problem_type=problem_type, **SIZES)
        self.bundle = exported(self.source)
        self.texts: list[tuple[str, ...]] = list(zip(TEXTS, OTHERS, strict=True)) if pair else [(text,) for text in TEXTS]
        model = PyTorch(self.source)
        self.logits = np.stack([model.logits(*texts, max_length=POSITIONS) for texts in self.texts]).astype(np.float64)


def expected_metrics(gold: NDArray[np.float64], logits: NDArray[np.float64]) -> dict[str, float]:
    """Returns the metrics of scipy and scikit-learn under the names of `verify`."""
    if logits.shape[1] == 1:
        values = logits[:, 0]
        return {
            "Pearson correlation": stats.pearsonr(gold, values).statistic,
            "Spearman correlation": stats.spearmanr(gold, values).statistic,
            "mean absolute error": metrics.mean_absolute_error(gold, values),
        }
    chosen = logits.argmax(axis=1)
    scores = {"accuracy": metrics.accuracy_score(gold, chosen), "Matthews correlation": metrics.matthews_corrcoef(gold, chosen)}
    of_labels = (
        {"F1": metrics.f1_score(gold, chosen)} if logits.shape[1] == 2 else {"macro F1": metrics.f1_score(gold, chosen, average="macro")}
    )
    return scores | of_labels


@pytest.mark.parametrize("name", [name if name in EACH_FORM else pytest.param(name, marks=pytest.mark.full_grid) for name in GLUE])
def test_metrics_of_a_glue_task_match(tmp_path: Path, verify: Verify, name: str) -> None:
    """Gold labels are the model's predictions with every third label changed; gold values are the ranks of its outputs, shifted."""
    columns, labels = GLUE[name]
    regression = labels == VALUE
    kind = "regression" if regression else "single_label_classification"
    model = Exported(tmp_path, labels, kind, pair=len(columns) == 2)

    if regression:  # 0 to 5 like human ratings, with ties
        ranks = model.logits[:, 0].argsort().argsort()
        gold = np.round(5 * np.roll(ranks, 1) / ranks.max())
        assert len(set(gold)) < len(gold)
    else:
        gold = model.logits.argmax(axis=1)
        gold[::3] = (gold[::3] + 1) % len(labels)
    ids = [float(value) if regression else int(value) for value in gold]
    lines = [
        dict(zip(columns, texts, strict=True)) | {"label": id_, "idx": i}
        for i, (texts, id_) in enumerate(zip(model.texts, ids, strict=True))
    ]
    code, checks = verify(model.bundle.path, "--data", json_lines(tmp_path / "data.jsonl", *lines))

    assert 0 == code
    expected = expected_metrics(gold, model.logits)
    for metric, value in expected.items():
        assert -1 < value < 1 or metric == "mean absolute error"
        assert {"graph": pytest.approx(value, abs=1e-5)} == checks[f"{metric} cpu/fp32"]["metrics"]


@pytest.mark.full_grid
def test_metrics_of_a_multi_label_model_match(tmp_path: Path, verify: Verify) -> None:
    """Each score is a sigmoid. Accuracy and micro F1 compare the labels with scores of at least 0.5 with the gold labels."""
    labels = ("joy", "anger", "fear", "surprise")
    model = Exported(tmp_path, labels, "multi_label_classification", pair=False)
    scores = 1 / (1 + np.exp(-model.logits))
    chosen = scores >= 0.5
    gold = chosen.copy()
    gold[::4, 1] ^= True
    assert {0, 1} < set(gold.sum(axis=1))  # texts with no label, one label and several labels
    lines = [{"text": text, "label": [labels[i] for i in np.flatnonzero(row)]} for (text,), row in zip(model.texts, gold, strict=True)]
    code, checks = verify(model.bundle.path, "--data", json_lines(tmp_path / "data.jsonl", *lines), "--min-metric", "micro-f1=0.99")

    expected = metrics.f1_score(gold, chosen, average="micro")
    assert (1, False) == (code, checks["micro F1 cpu/fp32"]["passed"])
    assert expected == pytest.approx(checks["micro F1 cpu/fp32"]["metrics"]["graph"])
    assert metrics.accuracy_score(gold, chosen) == pytest.approx(checks["accuracy cpu/fp32"]["metrics"]["graph"])
    assert 0.5 < expected < 0.99
