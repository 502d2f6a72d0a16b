"""Compares a text's outputs in a batch with those of the same text alone: whether its neighbors change an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from export import parallel
from service.backend.onnx_engine import Engine, Row
from service.bundle.graph_spec import Precision
from service.text.tokenizer import Encoding

# A graph with a larger error is not batch-invariant, and the service runs it one text at a time.
MAX_ROW_ERROR = 1e-5
# Half precision rounds to ten bits, and the direction may depend on the kernel that a batch's shape is given: a difference of this much
# between a text alone and in a batch is rounding, and no sign that texts see each other.
MAX_ROW_ERROR_FP16 = 2e-2
BATCH_ROWS = 4


def max_row_error(precision: Precision) -> float:
    """Returns the largest row error of a batch-invariant graph of this precision."""
    return MAX_ROW_ERROR_FP16 if precision == "fp16" else MAX_ROW_ERROR


def worst_row_error(engine: Engine, encodings: Sequence[Encoding], alone: Sequence[Row]) -> float:
    """Returns the largest absolute difference of an output between a row in a batch and the same row alone.

    Args:
        engine: The graph.
        encodings: The rows; neighbors in this order share batches, so lengths should vary.
        alone: The outputs of each row alone.
    """

    def worst_of(start: int) -> float:
        part = slice(start, start + BATCH_ROWS)
        pairs = zip(engine.run(encodings[part]), alone[part], strict=True)
        return max(float(np.abs(row[name] - single[name]).max(initial=0.0)) for row, single in pairs for name in row)

    return max(parallel.each(worst_of, range(0, len(encodings), BATCH_ROWS)), default=0.0)
