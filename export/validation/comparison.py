"""Comparison: one graph's answers against a reference's, with the bounds for its precision.

It is used at export, by `verify --checkpoint` and by `verify --data`. The reference is the checkpoint in PyTorch, or the float32 graph. The
bounds depend only on the graph's entry in the manifest, so that `verify` accepts on the same requests what the export accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.export.errors import ParityError
from bertserve.export.tasks.metrics import Span, result_spans, span_f1
from bertserve.export.validation.agreement import AgreementMeter, equal_but_for_ties
from bertserve.export.validation.served_graph import Answer, ServedGraph
from bertserve.service.bundle.graph_spec import Agreement, LengthParity, Precision
from bertserve.service.engine.onnx_engine import Row

# Maximum difference of a logit from the reference, by precision.
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1}
# The same relative to the row's largest logit, if that allows more: rounding errors grow with values, and a model without a norm before its
# head may have logits of hundreds. The absolute limits correspond to a largest logit of 5, a usual value of trained heads. For float32, the
# difference was at most 3e-6 on five trained checkpoints, and 1e-5 on random ones with logits from 1 to 1e12
# (docs/explanation/validation.md).
MAX_REL_ERROR: dict[Precision, float] = {"fp32": 2e-5, "fp16": 2e-2}
# Maximum error of int8 on ordinary texts, relative to the standard deviation of the reference's outputs: root mean square, and largest.
# The gate decides about the quality of int8; this check ensures that the served graph is the one of the gate
# (docs/explanation/validation.md).
MAX_INT8_RMS, MAX_INT8_WORST = 0.1, 3.0
INT8_SLACK = 2  # factor for the gate's error, if that allows more
FIXED_SAMPLES_FACTOR = 2  # factor for the root mean square of the fixed samples, which are more unusual than ordinary texts
SHORTEST_RANGE = 16  # in tokens; each range of the table by length is twice as long as the previous one


class RelativeError:
    """Error of a graph's outputs, relative to the reference's standard deviation; the largest one of several outputs.

    It stores only sums, because all rows of fill-mask together would need gigabytes.

    Attributes:
        rows: Number of added rows.
    """

    def __init__(self, other: RelativeError | None = None) -> None:
        """If the standard deviation of `other` is larger, errors are relative to that one: texts may all have the same label."""
        self.rows = 0
        self._other = other
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
        return _largest([math.sqrt(sums[3] / sums[0]) / self._spread(name) for name, (sums, _) in self._sums.items() if sums[0]])

    @property
    def worst(self) -> float:
        """Largest difference, relative to the standard deviation; 0 without rows."""
        return _largest([largest / self._spread(name) for name, (sums, largest) in self._sums.items() if sums[0]])

    def _spread(self, name: str) -> float:
        count, total, squares, _ = self._sums[name][0].tolist() if name in self._sums else (0, 0, 0, 0)
        own = math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else 0.0
        return max(own, 1e-12 if self._other is None else self._other._spread(name))


def _largest(values: list[float]) -> float:
    """Returns the largest value, or 0 if there is none; it returns NaN if a value is NaN, which `max` may ignore."""
    return float(np.max(values, initial=0.0))


@dataclass(frozen=True)
class _Difference:
    """The output value of a row with the largest difference, and the reference's largest magnitude in that row."""

    request: Any
    expected: float
    actual: float
    largest: float

    @property
    def error(self) -> float:
        return abs(self.actual - self.expected)

    def allowed(self, precision: Precision) -> float:
        """Returns the maximum allowed error; 1 for int8, which has no limit for a single logit."""
        return max(MAX_ABS_ERROR.get(precision, 1.0), MAX_REL_ERROR.get(precision, 0.0) * self.largest)

    def excess(self, precision: Precision) -> float:
        """Returns the error as a multiple of the allowed error; infinite if a value is not finite."""
        excess = self.error / self.allowed(precision)
        return excess if math.isfinite(excess) else math.inf


class Comparison:
    """The comparison of one graph with a reference, request by request.

    Attributes:
        served: The graph.
        results: Its results for the texts, which are all requests that are not fixed samples.
        expected: The reference's results for them; empty without a reference.
        error: Why there is no complete comparison; None if there is no reason.
    """

    def __init__(self, served: ServedGraph) -> None:
        """Prepares the comparison of a graph, whose entry in the manifest decides the bounds."""
        self.served, self._precision = served, served.graph.precision
        self.results, self.expected = list[Any](), list[Any]()
        self.error: str | None = None
        self._compared = 0
        self._different = 0  # fixed samples with another answer in float32
        self._all, self._on_texts = (AgreementMeter(served.task, served.config) for _ in range(2))
        self._fixed = RelativeError()
        self._texts = RelativeError(self._fixed)
        self._lengths: list[tuple[int, float, float]] = []  # of each row: tokens, largest error, the same relative to the largest logit
        self._worst: _Difference | None = None
        self._spans: list[tuple[set[Span], set[Span]]] = []

    @property
    def agreement_on_texts(self) -> Agreement | None:
        """The agreement on the texts; None if no text was compared."""
        return self._on_texts.agreement if self.expected else None

    def add(self, request: Any, actual: Answer, expected: Answer | None, *, fixed: bool) -> None:
        """Adds the graph's answer to a request, and compares it.

        Args:
            request: The request.
            actual: The graph's answer.
            expected: The reference's answer; its outputs are decoded if it has no result. None without a reference.
            fixed: Whether it is a fixed sample, whose answer in float32 must be equal.

        Raises:
            ParityError: The reference's encodings or outputs have other numbers or shapes.
            EngineError: The outputs cannot be decoded.
        """
        if expected is not None:
            differences = _differences(request, expected.rows, actual.rows)
            result = self.served.decode(request, expected.rows) if expected.result is None else expected.result
            self._add_errors(differences, actual, expected.rows, fixed=fixed)
            if fixed and self._precision == "fp32":
                tie = max((difference.allowed(self._precision) for difference in differences), default=0.0)
                self._different += not equal_but_for_ties(self.served.task, result, actual.result, tie)
            self._all.add(result, actual.result)
            self._spans.append((result_spans(result), result_spans(actual.result)))
            if not fixed:
                self.expected.append(result)
                self._on_texts.add(result, actual.result)
        if not fixed:
            self.results.append(actual.result)

    def _add_errors(self, differences: Sequence[_Difference], actual: Answer, expected: Sequence[Row], *, fixed: bool) -> None:
        self._compared += 1
        for encoding, difference, row, own in zip(actual.encodings, differences, expected, actual.rows, strict=True):
            (self._fixed if fixed else self._texts).add(row, own)
            self._lengths.append((len(encoding), difference.error, difference.error / (difference.largest or 1.0)))
            if self._worst is None or difference.excess(self._precision) > self._worst.excess(self._precision):
                self._worst = difference

    def measured(self) -> dict[str, Any]:
        """Returns the fields of a `ValidationReport` that this comparison measures."""
        agreement, lengths = self._all.agreement, _errors_by_length(self._lengths, self.served.tokenizer.max_length)
        return {
            "samples": self._compared,
            "worst_abs_error": max((entry.worst_abs_error for entry in lengths), default=0.0),
            "worst_rel_error": max((entry.worst_rel_error for entry in lengths), default=0.0),
            "label_agreement": agreement.value if agreement.measure == "label" else None,
            "agreement": agreement,
            "spans": sum(len(expected) for expected, _ in self._spans),
            "span_agreement": span_f1(*zip(*self._spans, strict=True)) if any(map(any, self._spans)) else None,
            "lengths": lengths,
            "longest": max((tokens for tokens, _, _ in self._lengths), default=0),
        }

    def check(self) -> None:
        """Checks the bounds of the graph's precision.

        Raises:
            ParityError: An error exceeds its bound, or a float32 answer to a fixed sample differs; the message has the worst case.
        """
        worst, precision = self._worst, self._precision
        if worst is None:
            return
        if precision == "int8":
            self._check_int8(worst)
        elif worst.excess(precision) > 1:
            raise ParityError(
                f"{precision} logits differ by {worst.error:.2e}, over the limit of {MAX_ABS_ERROR[precision]:.0e} or "
                f"{MAX_REL_ERROR[precision]:.0e} of the row's largest logit, which is {worst.largest:.3g}: "
                f"{describe(worst.request)}; expected {worst.expected}, got {worst.actual}."
            )
        elif self._different:
            raise ParityError(f"float32 answers to {self._different} of the fixed samples differ.")

    def _check_int8(self, worst: _Difference) -> None:
        """Refuses an int8 graph that differs from the reference by more than the gate's error explains."""
        report = self.served.graph.evidence
        limit = max(MAX_INT8_RMS, INT8_SLACK * report.quantization_error, report.quantization_limit)
        largest = limit * MAX_INT8_WORST / MAX_INT8_RMS
        groups = [(self._fixed, FIXED_SAMPLES_FACTOR * limit)]
        # a root mean square of few texts is not reliable
        groups.append((self._texts, limit if self._texts.rows >= self._fixed.rows else math.inf))
        for errors, rms in groups:
            if not (errors.rms <= rms and errors.worst <= largest):  # not `>`, which is false for NaN
                raise ParityError(
                    f"int8 logits differ by {errors.rms:.2g} of their spread, and at worst by {errors.worst:.2g}, over the limits of "
                    f"{rms:.2g} and {largest:.2g}: {describe(worst.request)}; expected {worst.expected:.3g}, got {worst.actual:.3g}. "
                    "Export again with texts of the model's own domain and language in --calibration, or with a lower --max-int8-error, "
                    "which keeps more matrices in float."
                )


def _errors_by_length(rows: Sequence[tuple[int, float, float]], max_length: int) -> tuple[LengthParity, ...]:
    """Returns the largest errors of rows by their length in tokens."""
    ranges: dict[int, list[tuple[float, float]]] = {}
    for tokens, *errors in rows:
        up_to = SHORTEST_RANGE
        while up_to < tokens:
            up_to *= 2
        ranges.setdefault(min(up_to, max_length), []).append((errors[0], errors[1]))
    return tuple(
        LengthParity(
            up_to=up_to,
            rows=len(errors),
            worst_abs_error=max(absolute for absolute, _ in errors),
            worst_rel_error=max(relative for _, relative in errors),
        )
        for up_to, errors in sorted(ranges.items())
    )


def _differences(request: Any, expected: Sequence[Row], rows: Sequence[Row]) -> list[_Difference]:
    """Returns the largest difference in each row of a request."""
    if len(rows) != len(expected):
        raise ParityError(f"{len(rows)} windows, but the reference has {len(expected)}: {describe(request)}.")
    shapes = [[{name: value.shape for name, value in row.items()} for row in side] for side in (expected, rows)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"outputs are {shapes[1]}, but the reference has {shapes[0]}: {describe(request)}.")
    differences = []
    for pair in zip(expected, rows, strict=True):
        a, b = (np.concatenate([np.zeros(1), *(value.ravel() for value in row.values())]) for row in pair)
        worst = int(np.abs(a - b).argmax())
        differences.append(_Difference(request, float(a[worst]), float(b[worst]), float(np.abs(a).max())))
    return differences


def describe(request: Any) -> str:
    """Returns the beginning of a request's texts, for a message."""
    texts = [getattr(request, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)
