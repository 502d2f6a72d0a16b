"""Measures how closely results agree with a reference's, by the measure of the task, and rows in a batch with the same rows alone.

Results are what the service's tasks return. A measure without anything to decide has no value, rather than full agreement. A row that its
neighbors in a batch change means that the graph is not batch-invariant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertserve.export import progress
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.metrics import f1, spearman
from bertserve.service.backend.onnx_engine import Engine, Row
from bertserve.service.bundle.graph_spec import Agreement, Measure, Precision
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.tokenizer import Encoding

_Pairs = Sequence[tuple[Any, Any]]

# A graph with a larger error is not batch-invariant, and the service runs it one text at a time.
MAX_ROW_ERROR = 1e-5
# Half precision rounds to ten bits, and the direction may depend on the kernel that a batch's shape is given: a difference of this much
# between a text alone and in a batch is rounding, and no sign that texts see each other.
MAX_ROW_ERROR_FP16 = 2e-2
# The same over the row's largest output, where that is more: rounding grows with what is rounded. It is what the bounds above are to a
# largest output of 5.
TRAINED_LARGEST = 5
# int8 with static scales gives a row the same numbers in a batch, unless a value lies so close to a rounding boundary that the last bit of a
# float32 sum decides: the row is then off by a step of int8, which is much less than int8 is off from float32. That happens to few rows.
# Dynamic scales, which depend on the batch, change nearly all rows.
MAX_INT8_SHARE = 0.05
BATCH_ROWS = 4
MAX_TOKENS = 2048  # of a row that is run in a batch: attention of a batch of longer ones takes gigabytes
_NEIGHBORS = 2  # rows that a batch needs to show anything


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
    return isinstance(result, list) and all(isinstance(item, dict) and isinstance(item.get("score"), float) for item in result)


def _identity(item: dict[str, Any]) -> str:
    """Returns what an item is, its floats left out."""
    return json.dumps({name: value for name, value in item.items() if not isinstance(value, float)}, sort_keys=True)


def cosine_distance(a: Any, b: Any) -> float:
    """Returns 1 - cosine of two vectors; of a text's token vectors the largest, each with its counterpart."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.max(1 - (x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)))


@dataclass(frozen=True)
class RowErrors:
    """How far rows in a batch are from the same rows alone.

    Attributes:
        worst: Largest absolute difference of an output.
        worst_scaled: Largest such difference over the largest output of its row, or over `TRAINED_LARGEST` where that is more.
        share: Share of the rows that differ by more than float32 rounds.
    """

    worst: float
    worst_scaled: float
    share: float

    def is_rounding(self, precision: Precision) -> bool:
        """Returns whether no row changes by more than rounding does in this precision: the graph is batch-invariant."""
        if precision == "int8" and self.share > MAX_INT8_SHARE:
            return False
        bound = MAX_ROW_ERROR if precision == "fp32" else MAX_ROW_ERROR_FP16
        return self.worst_scaled <= bound / TRAINED_LARGEST


def measure_row_errors(engine: Engine, encodings: Sequence[Encoding], alone: Sequence[Row]) -> RowErrors:
    """Runs rows in batches and compares them with the same rows alone.

    Args:
        engine: The graph.
        encodings: The rows; neighbors in this order share batches, so lengths should vary. Those over `MAX_TOKENS` are left out.
        alone: The outputs of each row alone.

    Raises:
        ValueError: There are fewer than two rows, so that no row has a neighbor.
    """
    rows = [pair for pair in zip(encodings, alone, strict=True) if len(pair[0]) <= MAX_TOKENS]
    if len(rows) < _NEIGHBORS:
        raise ValueError(f"{len(rows)} rows are too few to compare rows in batches; give at least {_NEIGHBORS}.")

    def errors_of(start: int) -> list[tuple[float, float]]:
        part = slice(start, start + BATCH_ROWS)
        return [_errors(row, single) for row, (_, single) in zip(engine.run([one for one, _ in rows[part]]), rows[part], strict=True)]

    errors = [error for batch in progress.each(errors_of, range(0, len(rows), BATCH_ROWS)) for error in batch]
    worst, scaled = np.max(errors, axis=0).tolist()  # not `max`, which may leave a NaN out
    share = float(np.mean([not error <= MAX_ROW_ERROR / TRAINED_LARGEST for _, error in errors]))
    return RowErrors(worst, scaled, share)


def _errors(row: Row, single: Row) -> tuple[float, float]:
    """Returns the largest difference of a row's outputs, as it is and over the row's largest output."""
    worst = float(np.max([np.abs(row[name] - single[name]).max(initial=0.0) for name in row]))
    largest = float(np.max([np.abs(values).max(initial=0.0) for values in single.values()]))
    return worst, worst / max(largest, TRAINED_LARGEST)
