"""Scores the labels and values of text classification: the figures that GLUE asks for, by what the model's head is. Pure.

Which figures there are follows from the head alone, so that a script finds the same ones for any data:

- one label, a regression: Pearson and Spearman correlation, mean absolute error
- two labels, of which one is right: accuracy, F1 of the second label, Matthews correlation
- more labels, of which one is right: accuracy, macro F1, Matthews correlation
- independent labels: accuracy of the whole set, micro F1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertserve.export.evidence.decisions import chosen_labels, regression_value
from bertserve.export.evidence.metrics import f1, macro_f1, matthews, pearson, spearman
from bertserve.export.verify.figures import ACCURACY, ERROR, F1, MACRO_F1, MATTHEWS, MICRO_F1, PEARSON, SPEARMAN
from bertserve.service.tasks.batch import ModelConfig

_TWO = 2
_SQUASHED = (
    "the model's values go through a sigmoid and lie between 0 and 1, and right answers do not; if it was trained on values as they are, set "
    '"problem_type": "regression" in its config.json and export it again'
)


def score_labels(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    """Returns the figures of a model; 0 stands for one that has no value, of which `score_notes` says why.

    Args:
        golds: At least one right answer: a set of labels, of one where labels exclude each other, or the number of a regression.
        results: What the task's decoder returned for each.
        config: The model's labels and activation.
    """
    if len(config.labels) == 1:
        values = [regression_value(result) for result in results]
        errors = [abs(value - gold) for value, gold in zip(values, golds, strict=True)]
        return {PEARSON: pearson(golds, values), SPEARMAN: spearman(golds, values), ERROR: sum(errors) / len(errors)}
    chosen = [chosen_labels(result, config) for result in results]
    accuracy = {ACCURACY: sum(a == b for a, b in zip(golds, chosen, strict=True)) / len(golds)}
    if config.activation == "sigmoid":
        right = sum(len(a & b) for a, b in zip(golds, chosen, strict=True))
        return accuracy | {MICRO_F1: f1(right, sum(map(len, chosen)), sum(map(len, golds)))}
    expected, found = _single(golds), _single(chosen)
    correlation = {MATTHEWS: matthews(expected, found)}
    if len(config.labels) > _TWO:
        return accuracy | {MACRO_F1: macro_f1(expected, found)} | correlation
    second = config.labels[1]
    right = sum(a == b == second for a, b in zip(expected, found, strict=True))
    counts = found.count(second), expected.count(second)
    return accuracy | {F1: f1(right, *counts) if any(counts) else 0.0} | correlation


def score_notes(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, str]:
    """Returns what a reader must know of figures of `score_labels`, by figure: those without a value, and those of another scale.

    The arguments are the same.
    """
    if len(config.labels) == 1:
        constant = _constant(golds, [regression_value(result) for result in results], "value")
        notes = {} if config.activation == "none" or all(0 <= gold <= 1 for gold in golds) else dict.fromkeys((PEARSON, ERROR), _SQUASHED)
        return notes | (dict.fromkeys((PEARSON, SPEARMAN), constant) if constant else {})
    chosen = [chosen_labels(result, config) for result in results]
    if config.activation == "sigmoid":
        return {} if any(golds) or any(chosen) else {MICRO_F1: "no input has a label, and none was found; 0 stands for it"}
    constant = _constant(golds, chosen, "label")
    notes = {MATTHEWS: constant} if constant else {}
    if len(config.labels) == _TWO and not any(config.labels[1] in labels for labels in (*golds, *chosen)):
        notes[F1] = f"no input has the label {config.labels[1]}, and it was never found; 0 stands for it"
    return notes


def _constant(golds: Sequence[Any], found: Sequence[Any], kind: str) -> str | None:
    """Returns why two series have no correlation, or None where they do."""
    for series, name in ((golds, "right answers are"), (found, "answers are")):
        if len(set(series)) == 1:
            return f"all {name} the same {kind}, which correlates with nothing; 0 stands for it"
    return None


def _single(labels: Sequence[frozenset[str]]) -> list[str]:
    """Returns the one label of each text."""
    return [label for (label,) in labels]
