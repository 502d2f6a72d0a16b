"""Compares a graph, with the service's own tokenizer, engine and decoder, with the checkpoint in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.export import progress
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.progress import track
from bertserve.export.tasks import catalog
from bertserve.export.tasks.metrics import Span, result_spans, span_f1
from bertserve.export.validation.agreement import AgreementMeter, RowErrors, equal_but_for_ties, measure_row_errors
from bertserve.export.validation.reference import Reference
from bertserve.service.backend.onnx_engine import Engine, Row
from bertserve.service.bundle.graph_spec import Agreement, LengthParity, Precision
from bertserve.service.errors import EngineError
from bertserve.service.tasks.batch import TaskModel, first_batch, result_of
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.wire.json_text import to_plain

# Maximum difference of a logit from PyTorch, by precision.
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1}
# The same relative to the row's largest logit, if that allows more: rounding errors grow with values, and a model without a norm before its
# head may have logits of hundreds. The absolute limits correspond to a largest logit of 5, a usual value of trained heads. For float32, the
# difference was at most 3e-6 on five trained checkpoints, and 1e-5 on random ones with logits from 1 to 1e12
# (docs/explanation/validation.md).
MAX_REL_ERROR: dict[Precision, float] = {"fp32": 2e-5, "fp16": 2e-2}
# Maximum error of int8 on ordinary texts, relative to the standard deviation of the checkpoint's outputs: root mean square, and largest.
# The gate decides about the quality of int8; this check ensures that the served graph is the one of the gate
# (docs/explanation/validation.md).
MAX_INT8_RMS, MAX_INT8_WORST = 0.1, 3.0
INT8_SLACK = 2  # factor for the gate's error, if that allows more
FIXED_SAMPLES_FACTOR = 2  # factor if the fixed samples decide, which are more unusual than ordinary texts
MAX_REASON = 300  # of ONNX Runtime's own message
SHORTEST_RANGE = 16  # in tokens; each range of the table by length is twice as long as the previous one


class RelativeError:
    """Error of a graph's outputs, relative to the reference's standard deviation; the largest one of several outputs.

    It stores only sums, because all rows of fill-mask together would need gigabytes.

    Attributes:
        rows: Number of added rows.
    """

    def __init__(self) -> None:
        self.rows = 0
        # output -> its count of values, sum, sum of squares and sum of squared errors, and its largest error
        self._sums: dict[str, tuple[NDArray[np.float64], float]] = {}

    def add(self, expected: Mapping[str, NDArray[np.float32]], actual: Mapping[str, NDArray[np.float32]]) -> None:
        """Adds a row: the outputs by name of the reference, of any shape, and those of the graph, with the same shapes."""
        self.rows += 1
        for name, output in expected.items():
            values = output.astype(np.float64).ravel()
            errors = actual[name].astype(np.float64).ravel() - values
            sums, largest = self._sums.get(name, (np.zeros(4), 0.0))
            sums = sums + np.array([values.size, values.sum(), values @ values, errors @ errors])
            # max() may ignore a NaN
            self._sums[name] = sums, float(np.maximum(largest, np.abs(errors).max(initial=0.0)))

    @property
    def rms(self) -> float:
        """Root mean square difference, relative to the standard deviation; 0 without rows."""
        return _largest([math.sqrt(sums[3] / sums[0]) / _spread(sums) for sums, _ in self._sums.values() if sums[0]])

    @property
    def worst(self) -> float:
        """Largest difference, relative to the standard deviation; 0 without rows."""
        return _largest([largest / _spread(sums) for sums, largest in self._sums.values() if sums[0]])


def _spread(sums: NDArray[np.float64]) -> float:
    count, total, squares, _ = sums.tolist()
    return max(math.sqrt(max(squares / count - (total / count) ** 2, 0.0)), 1e-12)


def _largest(values: list[float]) -> float:
    """Returns the largest value, or 0 if there is none; it returns NaN if a value is NaN, which `max` may ignore."""
    return float(np.max(values, initial=0.0))


@dataclass(frozen=True)
class Parity:
    """The result of the comparison; fields are as in `bertserve.service.bundle.graph_spec.ValidationReport`, with more `row_errors`."""

    samples: int
    worst_abs_error: float
    worst_rel_error: float
    agreement: Agreement
    spans: int
    span_agreement: float | None
    row_errors: RowErrors
    lengths: tuple[LengthParity, ...]
    longest: int

    @property
    def label_agreement(self) -> float | None:
        """The share of equal answers, or None if the agreement has another measure."""
        return self.agreement.value if self.agreement.measure == "label" else None


def measure_parity(
    engine: Engine, tokenizer: Tokenizer, reference: Reference, checkpoint: Checkpoint, precision: Precision, int8_bound: float
) -> Parity:
    """Runs the reference's requests alone and in mixed batches, and compares outputs and decoded answers.

    The precision decides the limits. `int8_bound` is the maximum root mean square error of int8, relative to the outputs' standard
    deviation, if it is more than `MAX_INT8_RMS`.

    Raises:
        ParityError: A logit differs too much, a decoded float32 answer differs, or the graph fails; the message has the worst case.
    """
    task = TASKS[checkpoint.task].run
    same_answers, differences, meter = 0, [], AgreementMeter(checkpoint.task, checkpoint)
    encodings, alone = list[Encoding](), list[Row]()
    fixed, texts = RelativeError(), RelativeError()
    spans: list[tuple[set[Span], set[Span]]] = []

    def run(request: Any) -> tuple[Sequence[Encoding], list[Row]]:
        windows = first_batch(task, request, TaskModel(tokenizer, checkpoint, Budget())).encodings
        return windows, [_run(engine, encoding, request) for encoding in windows]

    pairs = zip(reference.requests, reference.rows, progress.each(run, reference.requests), strict=True)
    for i, (request, expected, (batch, rows)) in enumerate(track(pairs, "compare answers", unit="samples", total=len(reference.rows))):
        encodings += batch
        alone += rows
        differences += (request_differences := _differences(request, expected, rows))
        for row, graph_row in zip(expected, rows, strict=True):
            (fixed if i < reference.fixed else texts).add(row, graph_row)
        right, answer = (_decoded(request, outputs, tokenizer, checkpoint) for outputs in (expected, rows))
        if precision == "fp32":
            tie = max(difference.allowed(precision) for difference in request_differences)
            same_answers += equal_but_for_ties(checkpoint.task, right, answer, tie)
        meter.add(right, answer)
        spans.append((result_spans(right), result_spans(answer)))
    worst = max(differences, key=lambda difference: difference.error)
    if precision == "int8":
        _check_int8(worst, fixed, texts, int8_bound)
    else:
        _check(max(differences, key=lambda difference: difference.excess(precision)), same_answers, len(reference.requests), precision)
    lengths = _errors_by_length(encodings, differences, tokenizer.max_length)
    return Parity(
        samples=len(reference.requests),
        worst_abs_error=worst.error,
        worst_rel_error=max((entry.worst_rel_error for entry in lengths), default=0.0),
        agreement=meter.agreement,
        spans=sum(len(right) for right, _ in spans),
        span_agreement=span_f1(*zip(*spans, strict=True)) if any(right or answer for right, answer in spans) else None,
        row_errors=measure_row_errors(engine, encodings, alone),
        lengths=lengths,
        longest=max(map(len, encodings)),
    )


def _decoded(request: Any, rows: Sequence[Row], tokenizer: Tokenizer, checkpoint: Checkpoint) -> Any:
    """Returns a request's result for the outputs of a checkpoint or a graph, as JSON."""
    model = TaskModel(tokenizer, checkpoint, Budget())
    return to_plain(result_of(TASKS[checkpoint.task].run, catalog.TASKS[checkpoint.task].resolve(request, checkpoint), model, rows))


@dataclass(frozen=True)
class _Difference:
    """The output value of a row with the largest difference from PyTorch's, and PyTorch's largest magnitude in that row."""

    request: Any
    expected: float
    actual: float
    largest: float

    @property
    def error(self) -> float:
        return abs(self.actual - self.expected)

    def allowed(self, precision: Precision) -> float:
        """Returns the maximum allowed error."""
        return max(MAX_ABS_ERROR[precision], MAX_REL_ERROR.get(precision, 0.0) * self.largest)

    def excess(self, precision: Precision) -> float:
        """Returns the error as a multiple of the allowed error; infinite if a value is not finite."""
        excess = self.error / self.allowed(precision)
        return excess if math.isfinite(excess) else math.inf


def _check(worst: _Difference, same_answers: int, samples: int, precision: Precision) -> None:
    """Refuses a graph beyond the limit of its precision, and a float32 graph with a different answer."""
    if worst.excess(precision) > 1:
        relative = MAX_REL_ERROR.get(precision)
        also = "" if relative is None else f" or {relative:.0e} of the row's largest logit, which is {worst.largest:.3g}"
        raise ParityError(
            f"{precision} logits differ by {worst.error:.2e}, over the limit of {MAX_ABS_ERROR[precision]:.0e}{also}: "
            f"{_describe(worst.request)}; expected {worst.expected}, got {worst.actual}."
        )
    if precision == "fp32" and same_answers < samples:
        raise ParityError(f"float32 answers agree on {same_answers} of {samples} samples, which is too few.")


def _check_int8(worst: _Difference, fixed: RelativeError, texts: RelativeError, bound: float) -> None:
    """Refuses an int8 graph that differs from the checkpoint by more than the gate's error explains."""
    # a standard deviation over few texts is not reliable
    spread, factor = (texts, 1) if texts.rows and texts.rows >= fixed.rows else (fixed, FIXED_SAMPLES_FACTOR)
    rms = factor * max(MAX_INT8_RMS, bound)
    largest, worst_error = MAX_INT8_WORST * rms / MAX_INT8_RMS, max(fixed.worst, texts.worst)
    if not (spread.rms <= rms and worst_error <= largest):  # not `>`, which is false for NaN
        raise ParityError(
            f"int8 logits differ from the checkpoint's by {spread.rms:.2g} of their spread, and at worst by {worst_error:.2g}, "
            f"over the limits of {rms:.2g} and {largest:.2g}: {_describe(worst.request)}; expected {worst.expected:.3g}, "
            f"got {worst.actual:.3g}. Give texts of the model's own domain and language with --calibration, or "
            "keep more matrices in float with a lower --max-int8-error."
        )


def _errors_by_length(encodings: Sequence[Encoding], differences: Sequence[_Difference], max_length: int) -> tuple[LengthParity, ...]:
    """Returns the largest errors of rows by their length in tokens."""
    errors: dict[int, list[tuple[float, float]]] = {}
    for encoding, difference in zip(encodings, differences, strict=True):
        up_to = SHORTEST_RANGE
        while up_to < len(encoding):
            up_to *= 2
        relative = difference.error / difference.largest if difference.largest else difference.error
        errors.setdefault(min(up_to, max_length), []).append((difference.error, relative))
    return tuple(
        LengthParity(
            up_to=up_to,
            rows=len(row_errors),
            worst_abs_error=max(absolute for absolute, _ in row_errors),
            worst_rel_error=max(relative for _, relative in row_errors),
        )
        for up_to, row_errors in sorted(errors.items())
    )


def _run(engine: Engine, encoding: Encoding, request: Any) -> Row:
    """Returns a row's outputs; if the graph fails where the checkpoint works, the trace does not support this length."""
    try:
        return engine.run([encoding])[0]
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on {len(encoding)} tokens, which PyTorch answers: {_describe(request)}. A traced "
            "graph cannot follow code that depends on the length or the values of a text; such a model is not "
            f"supported. {reason[:MAX_REASON]}"
        ) from error


def _differences(request: Any, expected: Sequence[Row], rows: Sequence[Row]) -> list[_Difference]:
    """Returns the largest difference in each window of a request."""
    if len(rows) != len(expected):
        raise ParityError(f"{len(rows)} windows, but the reference has {len(expected)}: {_describe(request)}.")
    shapes = [[{name: value.shape for name, value in row.items()} for row in side] for side in (expected, rows)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"outputs are {shapes[1]}, but the reference has {shapes[0]}: {_describe(request)}.")
    differences = []
    for pair in zip(expected, rows, strict=True):
        a, b = (np.concatenate([np.zeros(1), *(value.ravel() for value in row.values())]) for row in pair)
        worst = int(np.abs(a - b).argmax())
        differences.append(_Difference(request, float(a[worst]), float(b[worst]), float(np.abs(a).max())))
    return differences


def _describe(request: Any) -> str:
    texts = [getattr(request, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)
