"""The comparison of a graph with a reference, which is the checkpoint in PyTorch or the bundle's float32 graph, and its bounds.

It is used at export, by `verify --checkpoint` and by `verify --data`. The bounds depend only on the graph's entry in the manifest, so that
`verify` accepts on the same requests what the export accepted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.export import progress
from bertserve.export.errors import ParityError
from bertserve.export.tasks.metrics import result_spans, span_f1
from bertserve.export.validation.agreement import decide, measure_agreement
from bertserve.export.validation.served_graph import Answer, ServedGraph
from bertserve.service.bundle.graph_spec import Agreement, LengthParity, Precision
from bertserve.service.engine.onnx_engine import Row
from bertserve.service.errors import EngineError
from bertserve.service.text.tokenizer import Encoding

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

MAX_REASON = 300  # characters of ONNX Runtime's own message


@dataclass(frozen=True)
class Reference:
    """What graphs are compared with.

    Attributes:
        name: Its name in reports; empty if there is no reference, so that only rows in batches are compared with rows alone.
        requests: The fixed samples for graphs of each precision, and then ordinary texts for int8.
        answers: Its answer to each request; None without a reference.
        fixed: Number of the fixed samples.
        answer: Its answer to another request. It raises EngineError if it has none.
        own: The graphs whose answers these are; empty for the checkpoint.
        attention_error: A graph -> its largest error of an attention weight, or None. It raises ParityError if that is too large.
    """

    name: str
    requests: Sequence[Any]
    answers: Sequence[Answer | None]
    fixed: int
    answer: Callable[[Any], Answer | None] = lambda request: None
    own: Sequence[ServedGraph] = ()
    attention_error: Callable[[ServedGraph], float | None] = lambda served: None


class RelativeError:
    """Error of a graph's outputs, relative to the reference's standard deviation.

    It stores only sums, because all rows of fill-mask together would need gigabytes.

    Attributes:
        rows: Number of added rows.
    """

    def __init__(self, other: RelativeError | None = None) -> None:
        """If the standard deviation of `other` is larger, errors are relative to that one: texts may all have the same label."""
        self.rows = 0
        self._other = other
        # output -> its count of values, sum, sum of squares and sum of squared errors
        self._sums: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
        self._largest: dict[str, float] = defaultdict(float)

    def add(self, expected: Row, actual: Row) -> None:
        """Adds a row: the outputs by name of the reference, of any shape, and those of the graph, with the same shapes."""
        self.rows += 1
        for name, output in expected.items():
            values = output.astype(np.float64).ravel()
            errors = actual[name].astype(np.float64).ravel() - values
            self._sums[name] += [values.size, values.sum(), values @ values, errors @ errors]
            self._largest[name] = float(np.maximum(self._largest[name], np.abs(errors).max(initial=0.0)))  # max() may ignore a NaN

    def measure(self) -> tuple[float, float]:
        """Returns the root mean square and the largest error, relative to the standard deviation, of the worst output; 0 without rows."""
        used = {name: sums for name, sums in self._sums.items() if sums[0]}
        rms = [math.sqrt(sums[3] / sums[0]) / self._spread(name) for name, sums in used.items()]
        largest = [self._largest[name] / self._spread(name) for name in used]
        return float(np.max(rms, initial=0.0)), float(np.max(largest, initial=0.0))

    def _spread(self, name: str) -> float:
        count, total, squares, _ = self._sums[name].tolist()
        own = math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else 0.0
        return max(own, 1e-12 if self._other is None else self._other._spread(name))


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

    def excess(self, precision: Precision) -> float:
        """Returns the error as a multiple of the allowed one; infinite if it is not finite. int8 has no limit for a single logit."""
        excess = self.error / max(MAX_ABS_ERROR.get(precision, 1.0), MAX_REL_ERROR.get(precision, 0.0) * self.largest)
        return excess if math.isfinite(excess) else math.inf


class Comparison:
    """The comparison of one graph with a reference, request by request.

    Attributes:
        served: The graph.
        results: Its results for the texts, which are all requests that are not fixed samples.
        expected: The reference's results for them; empty without a reference.
        encodings: The encodings of the reference's own requests.
        rows: The graph's outputs for each of these encodings, run alone.
        error: Why there is no complete comparison; None if there is no reason.
    """

    def __init__(self, served: ServedGraph) -> None:
        """Prepares the comparison of a graph, whose entry in the manifest decides the bounds."""
        self.served, self._precision = served, served.graph.precision
        self.results, self.expected = list[Any](), list[Any]()
        self.encodings, self.rows = list[Encoding](), list[Row]()
        self.error: str | None = None
        self._fixed = RelativeError()
        self._texts = RelativeError(self._fixed)
        # of each request: the decisions of the reference and of the graph, their spans, and whether it is a fixed sample
        self._decisions, self._spans, self._is_fixed = list[tuple[Any, Any]](), list[tuple[Any, Any]](), list[bool]()
        self._lengths: list[tuple[int, float, float]] = []  # of each row: tokens, largest error, the same relative to the largest logit
        self._worst: _Difference | None = None

    def add(self, request: Any, actual: Answer, expected: Answer | None, *, fixed: bool) -> None:
        """Adds the graph's answer to a request, and compares it.

        Args:
            request: The request.
            actual: The graph's answer.
            expected: The reference's answer; its outputs are decoded if it has no result. None without a reference.
            fixed: Whether it is a fixed sample.

        Raises:
            ParityError: The reference's encodings or outputs have other numbers or shapes.
            EngineError: The outputs cannot be decoded.
        """
        if expected is not None:
            differences = _differences(request, expected.rows, actual.rows)
            result = self.served.decode(request, expected.rows) if expected.result is None else expected.result
            for encoding, difference, row, own in zip(actual.encodings, differences, expected.rows, actual.rows, strict=True):
                (self._fixed if fixed else self._texts).add(row, own)
                self._lengths.append((len(encoding), difference.error, difference.error / (difference.largest or 1.0)))
                if self._worst is None or difference.excess(self._precision) > self._worst.excess(self._precision):
                    self._worst = difference
            self._decisions.append(decide(self.served.task, self.served.config, result, actual.result))
            self._spans.append((result_spans(result), result_spans(actual.result)))
            self._is_fixed.append(fixed)
            if not fixed:
                self.expected.append(result)
        if not fixed:
            self.results.append(actual.result)

    def agreement(self, *, on_texts: bool = False) -> Agreement:
        """Returns the agreement on all compared requests, or only on the texts."""
        pairs = [pair for pair, fixed in zip(self._decisions, self._is_fixed, strict=True) if not (on_texts and fixed)]
        return measure_agreement(self.served.task.measure(self.served.config), pairs)

    def measured(self) -> dict[str, Any]:
        """Returns the fields of a `ValidationReport` that this comparison measures."""
        agreement, lengths = self.agreement(), _errors_by_length(self._lengths, self.served.tokenizer.max_length)
        return {
            "samples": len(self._decisions),
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
            ParityError: An error exceeds its bound; the message has the worst case.
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

    def _check_int8(self, worst: _Difference) -> None:
        """Refuses an int8 graph that differs from the reference by more than the gate's error explains."""
        report = self.served.graph.evidence
        limit = max(MAX_INT8_RMS, INT8_SLACK * report.quantization_error, report.quantization_limit)
        largest = limit * MAX_INT8_WORST / MAX_INT8_RMS
        # a root mean square of few texts is not reliable
        max_text_rms = limit if self._texts.rows >= self._fixed.rows else math.inf
        for errors, max_rms in ((self._fixed, FIXED_SAMPLES_FACTOR * limit), (self._texts, max_text_rms)):
            rms, error = errors.measure()
            if not (rms <= max_rms and error <= largest):  # not `>`, which is false for NaN
                raise ParityError(
                    f"int8 logits differ by {rms:.2g} of their spread, and at worst by {error:.2g}, over the limits of "
                    f"{max_rms:.2g} and {largest:.2g}: {describe(worst.request)}; expected {worst.expected:.3g}, got {worst.actual:.3g}. "
                    "Export again with texts of the model's own domain and language in --calibration, or with a lower --max-int8-error, "
                    "which keeps more matrices in float."
                )


def compare(served: ServedGraph, reference: Reference) -> Comparison:
    """Compares a graph with a reference, for int8 also on ordinary texts; the caller checks the bounds.

    Raises:
        ParityError: It fails on a request, or has other outputs than the reference.
        BertServeError: It cannot answer a request.
    """
    count = len(reference.requests) if served.graph.precision == "int8" else reference.fixed
    requests = reference.requests[:count]
    answers = progress.track(progress.each(partial(_answer, served), requests), "compare answers", unit="samples", total=count)
    comparison = Comparison(served)
    for i, answer in enumerate(answers):
        expected = None if served in reference.own else reference.answers[i]
        comparison.add(requests[i], answer, expected, fixed=i < reference.fixed)
        comparison.encodings += answer.encodings
        comparison.rows += answer.rows
    return comparison


def _answer(served: ServedGraph, request: Any) -> Answer:
    try:
        return served.answer(request)
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on a text that its reference answers: {describe(request)}. A traced graph cannot follow code that depends on "
            f"the length or the values of a text; such a model is not supported. {reason[:MAX_REASON]}"
        ) from error


def _errors_by_length(rows: Sequence[tuple[int, float, float]], max_length: int) -> tuple[LengthParity, ...]:
    """Returns the largest absolute and relative errors of rows by their length in tokens."""
    ranges = defaultdict[int, list[tuple[float, float]]](list)
    for tokens, *errors in rows:
        up_to = SHORTEST_RANGE
        while up_to < tokens:
            up_to *= 2
        ranges[min(up_to, max_length)].append((errors[0], errors[1]))
    return tuple(
        LengthParity(up_to=up_to, rows=len(errors), worst_abs_error=max(a for a, _ in errors), worst_rel_error=max(r for _, r in errors))
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
