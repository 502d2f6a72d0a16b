"""Measures how closely results agree with a reference's, by the task's measure, and rows in a batch with the same rows run alone.

Results are those of the service's tasks. A measure without decisions has no value, instead of full agreement. If the rows of a batch change
each other, the graph is not batch-invariant.
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
from bertserve.service.bundle.graph_spec import Agreement, Measure, Precision
from bertserve.service.check import difference
from bertserve.service.engine.onnx_engine import Engine, Row
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.tokenizer import Encoding

_Pairs = Sequence[tuple[Any, Any]]

# A graph with a larger error is not batch-invariant, and the service runs it one text at a time.
MAX_ROW_ERROR = 1e-5
# fp16 has ten bits, and rounding may depend on the kernel for a batch's shape. A difference of this size between a text alone and in
# a batch is rounding, and does not mean that texts affect each other.
MAX_ROW_ERROR_FP16 = 2e-2
# The limits apply relative to the row's largest output if that is larger than this, because rounding errors grow with values. The absolute
# limits above correspond to this largest output.
TRAINED_LARGEST = 5
# int8 with static scales gives a row the same numbers in a batch, unless a value is so close to a rounding boundary that the last bit of a
# float32 sum decides. Then the row differs by a step of int8, which is much less than int8's difference from float32. This happens to few
# rows. Dynamic scales, which depend on the batch, change nearly all rows.
MAX_INT8_SHARE = 0.05
BATCH_ROWS = 4
MAX_TOKENS = 2048  # of a row in a batch; attention of a batch of longer rows would need gigabytes
_NEIGHBORS = 2  # minimum rows of a batch


class AgreementMeter:
    """Compares results one by one, and stores only the values that the measure needs."""

    def __init__(self, task: str, config: ModelConfig) -> None:
        """Chooses the measure for a task, by its Hugging Face name, and for the model's labels and activation."""
        self._task = TASKS[task]
        self._config = config
        self._measure = self._task.measure(config)
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, expected: Any, actual: Any) -> None:
        """Adds the results of one input, as the task's decoder returned them: the reference's and the graph's."""
        if self._measure == "cosine":  # storing a vector per token would need too much memory
            self._pairs.append((1.0, 1.0 - cosine_distance(expected, actual)))
        else:
            self._pairs.append((self._reduced(expected), self._reduced(actual)))

    @property
    def agreement(self) -> Agreement:
        """The agreement over all inputs so far."""
        return _VALUES[self._measure](self._measure, self._pairs)

    def _reduced(self, result: Any) -> Any:
        decision = self._task.decision(result, self._config)
        # float32 agrees with PyTorch in about five digits; ranks of scores with smaller differences, as near 1, are only rounding
        return tuple(float(f"{value:.5g}") for value in decision) if self._measure == "spearman" else decision


def _equal_share(measure: Measure, pairs: _Pairs) -> Agreement:
    equal = sum(equal_but_for_scores(a, b) for a, b in pairs)
    return Agreement(measure=measure, value=equal / len(pairs) if pairs else None, decisions=len(pairs))


def _f1_of_sets(measure: Measure, pairs: _Pairs) -> Agreement:
    decisions = [(a, b) for a, b in pairs if a or b]
    right, actual, expected = sum(len(a & b) for a, b in decisions), sum(len(b) for _, b in decisions), sum(len(a) for a, _ in decisions)
    return Agreement(measure=measure, value=f1(right, actual, expected) if decisions else None, decisions=len(decisions))


def _mean_cosine(measure: Measure, pairs: _Pairs) -> Agreement:
    cosines = [min(cosine, 1.0) for _, cosine in pairs]
    if not cosines:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=sum(cosines) / len(cosines), decisions=len(cosines), worst=min(cosines))


def _rank_correlation(measure: Measure, pairs: _Pairs) -> Agreement:
    """Returns the lowest correlation of a label."""
    by_label = zip(*(zip(*scores, strict=True) for scores in zip(*pairs, strict=True)), strict=True)
    # a reference with equal scores has no order; a graph with equal scores has lost the order, which is 0
    values = [spearman(expected, actual) for expected, actual in by_label if len(set(expected)) > 1]
    if not values:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=min(values), decisions=len(pairs))


_VALUES: dict[Measure, Callable[[Measure, _Pairs], Agreement]] = {
    "label": _equal_share,
    "set_f1": _f1_of_sets,
    "span_f1": _f1_of_sets,
    "cosine": _mean_cosine,
    "spearman": _rank_correlation,
}


def equal_but_for_scores(expected: Any, actual: Any) -> bool:
    """Returns whether two results or decisions are equal, ignoring the values of floats."""
    return difference(expected, actual, math.inf) is None


def equal_but_for_ties(task: str, expected: Any, actual: Any, tolerance: float) -> bool:
    """Returns whether two results are equal, where items whose scores differ by at most `tolerance` may be in either order."""
    scored = TASKS[task].best_first and _is_scored(expected) and _is_scored(actual) and len(expected) == len(actual)
    if not scored:
        nested = isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual)
        if nested and all(isinstance(item, list) for item in expected):
            return all(equal_but_for_ties(task, *pair, tolerance) for pair in zip(expected, actual, strict=True))
        return equal_but_for_scores(expected, actual)
    scores = {_identity(item): item["score"] for item in expected}
    # an item that the reference lacks comes after its last one, and is allowed if its score is nearly equal
    last = expected[-1]["score"] if expected else 0.0
    return all(
        _identity(reference) == _identity(item)
        or abs(reference["score"] - scores.get(_identity(item), last if abs(item["score"] - last) <= tolerance else math.inf)) <= tolerance
        for reference, item in zip(expected, actual, strict=True)
    )


def _is_scored(result: Any) -> bool:
    return isinstance(result, list) and all(isinstance(item, dict) and isinstance(item.get("score"), float) for item in result)


def _identity(item: dict[str, Any]) -> str:
    """Returns an item's identity: its fields without floats."""
    return json.dumps({name: value for name, value in item.items() if not isinstance(value, float)}, sort_keys=True)


def cosine_distance(a: Any, b: Any) -> float:
    """Returns 1 - cosine of two vectors; for a text's token vectors, the largest distance of corresponding ones."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.max(1 - (x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)))


@dataclass(frozen=True)
class RowErrors:
    """Differences of rows in a batch from the same rows run alone.

    Attributes:
        worst: Largest absolute difference of an output.
        worst_scaled: Largest difference relative to the largest output of its row, or to `TRAINED_LARGEST` if that is more.
        share: Share of the rows with a difference beyond float32 rounding.
    """

    worst: float
    worst_scaled: float
    share: float

    def is_rounding(self, precision: Precision) -> bool:
        """Returns whether all differences are rounding in this precision, so that the graph is batch-invariant."""
        if precision == "int8" and self.share > MAX_INT8_SHARE:
            return False
        bound = MAX_ROW_ERROR if precision == "fp32" else MAX_ROW_ERROR_FP16
        return self.worst_scaled <= bound / TRAINED_LARGEST


def measure_row_errors(engine: Engine, encodings: Sequence[Encoding], alone: Sequence[Row]) -> RowErrors:
    """Runs rows in batches, and compares them with the same rows run alone.

    Neighbors share batches, so their lengths should vary. Rows over `MAX_TOKENS` are left out.

    Raises:
        ValueError: There are fewer than two rows, so there is no batch.
    """
    rows = [pair for pair in zip(encodings, alone, strict=True) if len(pair[0]) <= MAX_TOKENS]
    if len(rows) < _NEIGHBORS:
        raise ValueError(f"{len(rows)} rows are too few to compare rows in batches; give at least {_NEIGHBORS}.")

    def errors_of(start: int) -> list[tuple[float, float]]:
        part = slice(start, start + BATCH_ROWS)
        return [
            _errors(row, single) for row, (_, single) in zip(engine.run([encoding for encoding, _ in rows[part]]), rows[part], strict=True)
        ]

    errors = [error for batch in progress.each(errors_of, range(0, len(rows), BATCH_ROWS)) for error in batch]
    worst, scaled = np.max(errors, axis=0).tolist()  # `max` may ignore a NaN
    share = float(np.mean([not error <= MAX_ROW_ERROR / TRAINED_LARGEST for _, error in errors]))
    return RowErrors(worst, scaled, share)


def _errors(row: Row, single: Row) -> tuple[float, float]:
    """Returns the largest difference of a row's outputs, absolute and relative to the row's largest output."""
    worst = float(np.max([np.abs(row[name] - single[name]).max(initial=0.0) for name in row]))
    largest = float(np.max([np.abs(values).max(initial=0.0) for values in single.values()]))
    return worst, worst / max(largest, TRAINED_LARGEST)
