"""Measures how closely results agree with a reference's, by the measure of the task. Pure.

Results are what the service's tasks return. A measure without anything to decide has no value, rather than full agreement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.metrics import f1, spearman
from bertserve.service.bundle.graph_spec import Agreement, Measure
from bertserve.service.tasks.batch import ModelConfig

_Pairs = Sequence[tuple[Any, Any]]


class AgreementMeter:
    """Compares results one by one, and keeps only what the measure needs."""

    def __init__(self, task: str, config: ModelConfig) -> None:
        """Chooses the measure.

        Args:
            task: Hugging Face name of the task.
            config: The model's labels and activation.
        """
        self._task = TASKS[task]
        self._config = config
        self._measure = self._task.measure(config)
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, expected: Any, actual: Any) -> None:
        """Counts the results of one input in.

        Args:
            expected: The reference's result, as the task's decoder returned it.
            actual: The graph's.
        """
        if self._measure == "cosine":  # a vector for each token of a text is too much to keep
            self._pairs.append((1.0, 1.0 - cosine_distance(expected, actual)))
        else:
            self._pairs.append((self._reduced(expected), self._reduced(actual)))

    @property
    def agreement(self) -> Agreement:
        """The agreement over all inputs so far."""
        return _VALUES[self._measure](self._measure, self._pairs)

    def _reduced(self, result: Any) -> Any:
        decision = self._task.decision(result, self._config)
        # float32 agrees with PyTorch in about five digits; the ranks of scores that differ by less, as near 1, are rounding
        return float(f"{decision:.5g}") if self._measure == "spearman" else decision


def _equal_share(measure: Measure, pairs: _Pairs) -> Agreement:
    equal = sum(equal_but_for_scores(a, b) for a, b in pairs)
    return Agreement(measure=measure, value=equal / len(pairs) if pairs else None, decisions=len(pairs))


def _f1_of_sets(measure: Measure, pairs: _Pairs) -> Agreement:
    some = [(a, b) for a, b in pairs if a or b]
    right, found, expected = sum(len(a & b) for a, b in some), sum(len(b) for _, b in some), sum(len(a) for a, _ in some)
    return Agreement(measure=measure, value=f1(right, found, expected) if some else None, decisions=len(some))


def _mean_cosine(measure: Measure, pairs: _Pairs) -> Agreement:
    cosines = [min(cosine, 1.0) for _, cosine in pairs]
    if not cosines:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=sum(cosines) / len(cosines), decisions=len(cosines), worst=min(cosines))


def _rank_correlation(measure: Measure, pairs: _Pairs) -> Agreement:
    # a reference that gives all inputs one score has no order; a graph that does so lost the order, which is 0
    if len({expected for expected, _ in pairs}) <= 1:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=spearman(*zip(*pairs, strict=True)), decisions=len(pairs))


_VALUES: dict[Measure, Callable[[Measure, _Pairs], Agreement]] = {
    "label": _equal_share,
    "set_f1": _f1_of_sets,
    "span_f1": _f1_of_sets,
    "cosine": _mean_cosine,
    "spearman": _rank_correlation,
}


def equal_but_for_scores(expected: Any, actual: Any) -> bool:
    """Returns whether two results or decisions are equal if the values of their floats are left out."""
    if isinstance(expected, list):
        return isinstance(actual, list) and len(expected) == len(actual) and all(map(equal_but_for_scores, expected, actual))
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and expected.keys() == actual.keys()
            and all(equal_but_for_scores(expected[key], actual[key]) for key in expected)
        )
    if isinstance(expected, float):
        return isinstance(actual, float)
    return type(expected) is type(actual) and bool(expected == actual)


def equal_but_for_ties(task: str, expected: Any, actual: Any, tolerance: float) -> bool:
    """Returns whether two results are equal, if items whose scores are nearly equal may be in either order.

    Args:
        task: Hugging Face name of the task, which says whether its lists are ordered by score.
        expected: The reference's result.
        actual: The graph's result.
        tolerance: How far two scores may differ that rounding can order either way.
    """
    scored = TASKS[task].best_first and _is_scored(expected) and _is_scored(actual) and len(expected) == len(actual)
    if not scored:
        nested = isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual)
        if nested and all(isinstance(item, list) for item in expected):
            return all(equal_but_for_ties(task, one, other, tolerance) for one, other in zip(expected, actual, strict=True))
        return equal_but_for_scores(expected, actual)
    scores = {_identity(item): item["score"] for item in expected}
    # an item that the reference has not is one behind its last, and may be there if it is nearly as good
    last = expected[-1]["score"] if expected else 0.0
    return all(
        _identity(one) == _identity(other)
        or abs(one["score"] - scores.get(_identity(other), last if abs(other["score"] - last) <= tolerance else math.inf)) <= tolerance
        for one, other in zip(expected, actual, strict=True)
    )


def _is_scored(result: Any) -> bool:
    """Returns whether a result is a list of items with scores."""
    return isinstance(result, list) and all(isinstance(item, dict) and isinstance(item.get("score"), float) for item in result)


def _identity(item: dict[str, Any]) -> str:
    """Returns what an item is, its floats left out."""
    return json.dumps({name: value for name, value in item.items() if not isinstance(value, float)}, sort_keys=True)


def cosine_distance(a: Any, b: Any) -> float:
    """Returns 1 - cosine of two vectors; of a text's token vectors the largest, each with its counterpart."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.max(1 - (x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)))
