"""How closely decisions agree with those of a reference, by the task's measure, and rows in a batch with the same rows run alone.

A measure without decisions has no value, instead of full agreement. If the rows of a batch change each other, the graph is not
batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertserve.export import progress
from bertserve.export.tasks.metrics import f1, spearman
from bertserve.export.tasks.spec import ExportTask
from bertserve.service.bundle.graph_spec import Agreement, Measure, Precision
from bertserve.service.engine.onnx_engine import Engine, Row
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.tokenizer import Encoding

# A graph with a larger error of a row in a batch is not batch-invariant, and the service runs it one text at a time.
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


def decide(task: ExportTask, config: ModelConfig, expected: Any, actual: Any) -> tuple[Any, Any]:
    """Returns what the task's measure needs of two results: their decisions, or for vectors 1 and their cosine."""
    measure = task.measure(config)
    if measure == "cosine":  # storing a vector per token would need too much memory
        return 1.0, 1.0 - cosine_distance(expected, actual)
    first, second = task.decision(expected, config), task.decision(actual, config)
    if measure == "spearman":
        # float32 agrees with PyTorch in about five digits; ranks of scores with smaller differences, as near 1, are only rounding
        first, second = ([float(f"{value:.5g}") for value in values] for values in (first, second))
    return first, second


def measure_agreement(measure: Measure, pairs: Sequence[tuple[Any, Any]]) -> Agreement:
    """Returns the agreement of decisions: pairs of the reference's and the graph's."""
    value, count, worst = None, len(pairs), None
    if measure == "spearman":
        # the scores of each label, of the reference and of the graph; the lowest correlation of a label counts
        by_label = zip(*(zip(*scores, strict=True) for scores in zip(*pairs, strict=True)), strict=True)
        # a reference with equal scores has no order; a graph with equal scores has lost the order, which is 0
        value = min((spearman(expected, actual) for expected, actual in by_label if len(set(expected)) > 1), default=None)
    elif measure == "cosine" and pairs:
        cosines = [min(cosine, 1.0) for _, cosine in pairs]
        value, worst = sum(cosines) / count, min(cosines)
    elif measure == "label" and pairs:
        value = sum(expected == actual for expected, actual in pairs) / count
    elif sets := [(a, b) for a, b in pairs if a or b]:
        count = len(sets)
        value = f1(sum(len(a & b) for a, b in sets), sum(len(b) for _, b in sets), sum(len(a) for a, _ in sets))
    return Agreement(measure=measure, value=value, decisions=0 if value is None else count, worst=worst)


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
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows are too few to compare rows in batches; give at least 2.")

    def errors_of(start: int) -> list[tuple[float, float]]:
        part = rows[start : start + BATCH_ROWS]
        together = engine.run([encoding for encoding, _ in part])
        return [_row_errors(row, single) for row, (_, single) in zip(together, part, strict=True)]

    errors = [error for batch in progress.each(errors_of, range(0, len(rows), BATCH_ROWS)) for error in batch]
    worst, scaled = np.max(errors, axis=0).tolist()  # `max` may ignore a NaN
    share = float(np.mean([not error <= MAX_ROW_ERROR / TRAINED_LARGEST for _, error in errors]))
    return RowErrors(worst, scaled, share)


def _row_errors(row: Row, single: Row) -> tuple[float, float]:
    """Returns the largest difference of a row's outputs, absolute and relative to the row's largest output."""
    worst = float(np.max([np.abs(row[name] - single[name]).max(initial=0.0) for name in row]))
    largest = float(np.max([np.abs(values).max(initial=0.0) for values in single.values()]))
    return worst, worst / max(largest, TRAINED_LARGEST)
