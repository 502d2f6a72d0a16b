"""Compares a text's outputs in a batch with those of the same text alone: whether its neighbors change an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertserve.export import parallel
from bertserve.service.backend.onnx_engine import Engine, Row
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.text.tokenizer import Encoding

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
        raise ValueError(f"{len(rows)} rows show nothing about rows in batches; give at least {_NEIGHBORS}.")

    def errors_of(start: int) -> list[tuple[float, float]]:
        part = slice(start, start + BATCH_ROWS)
        return [_errors(row, single) for row, (_, single) in zip(engine.run([one for one, _ in rows[part]]), rows[part], strict=True)]

    errors = [error for batch in parallel.each(errors_of, range(0, len(rows), BATCH_ROWS)) for error in batch]
    worst, scaled = np.max(errors, axis=0).tolist()  # not `max`, which may leave a NaN out
    share = float(np.mean([not error <= MAX_ROW_ERROR / TRAINED_LARGEST for _, error in errors]))
    return RowErrors(worst, scaled, share)


def _errors(row: Row, single: Row) -> tuple[float, float]:
    """Returns the largest difference of a row's outputs, as it is and over the row's largest output."""
    worst = float(np.max([np.abs(row[name] - single[name]).max(initial=0.0) for name in row]))
    largest = float(np.max([np.abs(values).max(initial=0.0) for values in single.values()]))
    return worst, worst / max(largest, TRAINED_LARGEST)
