"""The comparison of a graph with a reference, which is the checkpoint in PyTorch or the bundle's float32 graph, and its bounds.

It is used at export, by `verify --checkpoint` and by `verify --data`. The bounds depend only on the graph's entry in the manifest, so that
`verify` accepts on the same requests what the export accepted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.export import progress
from bertserve.export.errors import ParityError
from bertserve.export.tasks.metrics import f1, spearman
from bertserve.export.tasks.spec import ExportTask
from bertserve.export.validation.served_graph import Answer, ServedGraph
from bertserve.service.bundle.graph_spec import Agreement, LengthParity, Precision
from bertserve.service.engine.onnx_engine import Engine, Row
from bertserve.service.errors import EngineError
from bertserve.service.tasks import attention
from bertserve.service.tasks.batch import ModelConfig
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
MAX_ATTENTION_ERROR = 1e-4  # of an attention weight, which is from 0 to 1, for float32
SHORTEST_RANGE = 16  # in tokens; each range of the table by length is twice as long as the previous one
MAX_REASON = 300  # characters of ONNX Runtime's own message

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
        maps: Requests for attention with their weights, float32 [maps, length, length].
    """

    name: str
    requests: Sequence[Any]
    answers: Sequence[Answer | None]
    fixed: int
    answer: Callable[[Any], Answer | None] = lambda request: None
    own: Sequence[ServedGraph] = ()
    maps: Sequence[tuple[attention.AttentionRequest, NDArray[np.float32]]] = ()


@dataclass(frozen=True)
class RowError:
    """The difference of a row of outputs from the reference's; sums replace the outputs, which would need gigabytes for fill-mask.

    Attributes:
        request: The request of the row; None for a row in a batch.
        tokens: Number of tokens.
        expected: The reference's value with the largest difference.
        actual: The graph's value there.
        largest: The reference's largest magnitude.
        sums: Output -> number of the reference's values, their sum, sum of squares, sum of squared differences, largest difference.
    """

    request: Any
    tokens: int
    expected: float
    actual: float
    largest: float
    sums: Mapping[str, NDArray[np.float64]]

    @property
    def error(self) -> float:
        """The largest difference."""
        return abs(self.actual - self.expected)

    def excess(self, precision: Precision) -> float:
        """Returns the error as a multiple of the allowed one; infinite if it is not finite. int8 has no limit for a single logit."""
        excess = self.error / max(MAX_ABS_ERROR.get(precision, 1.0), MAX_REL_ERROR.get(precision, 0.0) * self.largest)
        return excess if math.isfinite(excess) else math.inf


def relative_errors(rows: Sequence[RowError], others: Sequence[RowError] = ()) -> tuple[float, float]:
    """Returns the root mean square and the largest error of the worst output; 0 without values, and NaN if an error is NaN.

    They are relative to the standard deviation of the reference's outputs for `rows`, or for `others` if it is larger.
    """
    errors = [(0.0, 0.0)]
    for name in rows[0].sums if rows else ():
        spread = max(_spread(rows, name), _spread(others, name), 1e-12)
        count, squares, largest = np.array([row.sums[name][[0, 3, 4]] for row in rows]).T
        errors.append((math.sqrt(squares.sum() / max(count.sum(), 1)) / spread, largest.max() / spread))
    rms, worst = np.max(errors, axis=0).tolist()  # Python's `max` may ignore a NaN
    return rms, worst


def _spread(rows: Sequence[RowError], name: str) -> float:
    """Returns the standard deviation of an output of the reference."""
    count, total, squares = np.sum([row.sums[name][:3] for row in rows], axis=0).tolist() if rows else (0, 0, 0)
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else 0.0


class Comparison:
    """The comparison of one graph with a reference, request by request: the samples first, then texts.

    `expected` is empty without a reference, and for the reference's own graph; `error` says why a request has no answer.
    """

    def __init__(self, served: ServedGraph, reference: Reference) -> None:
        self.served, self.reference = served, reference
        self.is_own = served in reference.own
        self.results, self.expected = list[Any](), list[Any]()
        self.worst_row_error, self.batch_invariant = 0.0, False
        self.attention_error: float | None = None
        self.error: str | None = None
        self._samples, self._texts = list[RowError](), list[RowError]()

    def add(self, request: Any, actual: Answer, expected: Answer | None) -> None:
        """Adds the graph's answer to a request, and compares it with the reference's, whose outputs are decoded if it has no result.

        It raises ParityError if their numbers or shapes differ, and EngineError if the outputs cannot be decoded.
        """
        if expected is not None and not self.is_own:
            rows = self._samples if len(self.results) < self.reference.fixed else self._texts
            rows += _row_errors(request, actual, expected.rows)
            self.expected.append(self.served.decode(request, expected.rows) if expected.result is None else expected.result)
        self.results.append(actual.result)

    def agreement(self, start: int = 0) -> Agreement:
        """Returns the agreement on the requests from `start` on."""
        return measure_agreement(self.served.task, self.served.config, self.expected[start:], self.results[start:])

    def measured(self) -> dict[str, Any]:
        """Returns the fields of a `ValidationReport` that this comparison measures."""
        rows = self._samples + self._texts
        lengths = _errors_by_length(rows, self.served.tokenizer.max_length)
        return {
            "samples": len(self.results),
            "worst_abs_error": max((entry.worst_abs_error for entry in lengths), default=0.0),
            "worst_row_error": self.worst_row_error,
            "agreement": self.agreement(),
            "lengths": lengths,
            "longest": max((row.tokens for row in rows), default=0),
            "attention_error": self.attention_error,
            "provider": self.served.provider,
        }

    def check(self) -> None:
        """Checks the bounds of the graph's precision; raises ParityError with the worst case if an error exceeds its bound."""
        precision = self.served.graph.precision
        worst = max(self._samples + self._texts, key=lambda row: row.excess(precision), default=None)
        if worst is not None and precision == "int8":
            self._check_int8(worst)
        elif worst is not None and worst.excess(precision) > 1:
            raise ParityError(
                f"{precision} logits differ by {worst.error:.2e}, over the limit of {MAX_ABS_ERROR[precision]:.0e} or "
                f"{MAX_REL_ERROR[precision]:.0e} of the row's largest logit, which is {worst.largest:.3g}: "
                f"{_describe(worst.request)}; expected {worst.expected}, got {worst.actual}."
            )
        if precision == "fp32" and self.attention_error is not None and not self.attention_error <= MAX_ATTENTION_ERROR:
            raise ParityError(
                f"fp32 attention weights differ by {self.attention_error:.2e}, over the limit of {MAX_ATTENTION_ERROR:.0e}; export it "
                "without --attentions."
            )

    def _check_int8(self, worst: RowError) -> None:
        """Refuses an int8 graph that differs from the reference by more than the gate's error explains."""
        report = self.served.graph.validation
        limit = max(MAX_INT8_RMS, INT8_SLACK * report.quantization_error, report.quantization_limit)
        largest = limit * MAX_INT8_WORST / MAX_INT8_RMS
        # a root mean square of few texts is not reliable
        max_text_rms = limit if len(self._texts) >= len(self._samples) else math.inf
        # texts may all have the same label, so their outputs may have no spread
        of_texts = relative_errors(self._texts, self._samples)
        for (rms, error), max_rms in ((relative_errors(self._samples), FIXED_SAMPLES_FACTOR * limit), (of_texts, max_text_rms)):
            if not (rms <= max_rms and error <= largest):  # not `>`, which is false for NaN
                raise ParityError(
                    f"int8 logits differ by {rms:.2g} of their spread, and at worst by {error:.2g}, over the limits of "
                    f"{max_rms:.2g} and {largest:.2g}: {_describe(worst.request)}; expected {worst.expected:.3g}, got {worst.actual:.3g}. "
                    "Export again with texts of the model's own domain and language in --calibration, or with a lower --max-int8-error, "
                    "which keeps more matrices in float."
                )


def compare(served: ServedGraph, reference: Reference) -> Comparison:
    """Compares a graph with a reference, for int8 also on ordinary texts; the caller checks the bounds.

    It raises ParityError if the graph fails on a request or has outputs of another shape, and BertServeError if it cannot answer a request.
    """
    count = len(reference.requests) if served.graph.precision == "int8" else reference.fixed
    requests = reference.requests[:count]
    answers = progress.track(progress.each(partial(answer_sample, served), requests), "compare answers", unit="samples", total=count)
    comparison = Comparison(served, reference)
    encodings, rows = list[Encoding](), list[Row]()
    for answer, request, expected in zip(answers, requests, reference.answers, strict=False):
        comparison.add(request, answer, expected)
        encodings += answer.encodings
        rows += answer.rows
    comparison.worst_row_error, comparison.batch_invariant = measure_row_errors(served.engine, served.graph.precision, encodings, rows)
    if reference.maps:
        errors = [_attention_error(served, *weights) for weights in reference.maps]
        comparison.attention_error = float(np.max(errors))  # `max` may ignore a NaN
    return comparison


def _attention_error(served: ServedGraph, request: attention.AttentionRequest, weights: NDArray[np.float32]) -> float:
    encoding, _ = attention.encode(request, served.tokenizer)
    if weights.shape[-1] != len(encoding):
        raise ParityError(f"a text has {len(encoding)} tokens, but {weights.shape[-1]} with the checkpoint's tokenizer.")
    [row] = served.engine.run([encoding])
    return float(np.abs(row[attention.OUTPUT] - weights).max())


def answer_sample(served: ServedGraph, request: Any) -> Answer:
    """Returns a graph's answer to a sample; raises ParityError if it has none."""
    try:
        return served.answer(request)
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on a text that its reference answers: {_describe(request)}. A traced graph cannot follow code that depends on "
            f"the length or the values of a text; such a model is not supported. {reason[:MAX_REASON]}"
        ) from error


def _errors_by_length(rows: Sequence[RowError], max_length: int) -> tuple[LengthParity, ...]:
    """Returns the largest absolute and relative errors of rows by their length in tokens."""
    ranges = defaultdict[int, list[RowError]](list)
    for row in rows:
        up_to = SHORTEST_RANGE
        while up_to < row.tokens:
            up_to *= 2
        ranges[min(up_to, max_length)].append(row)
    return tuple(
        LengthParity(
            up_to=up_to,
            rows=len(group),
            worst_abs_error=max(row.error for row in group),
            worst_rel_error=max(row.error / (row.largest or 1.0) for row in group),
        )
        for up_to, group in sorted(ranges.items())
    )


def _row_errors(request: Any, actual: Answer, expected: Sequence[Row]) -> list[RowError]:
    """Returns the differences of the rows of a request."""
    if len(actual.rows) != len(expected):
        raise ParityError(f"{len(actual.rows)} windows, but the reference has {len(expected)}: {_describe(request)}.")
    shapes = [[{name: value.shape for name, value in row.items()} for row in side] for side in (expected, actual.rows)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"outputs are {shapes[1]}, but the reference has {shapes[0]}: {_describe(request)}.")
    return [row_error(request, *row) for row in zip(actual.encodings, expected, actual.rows, strict=True)]


def row_error(request: Any, encoding: Encoding, expected: Row, actual: Row) -> RowError:
    """Returns the difference of a row from the reference's, which has the same shapes."""
    sums = {}
    for name, output in expected.items():
        values = output.astype(np.float64).ravel()
        errors = actual[name].astype(np.float64).ravel() - values
        sums[name] = np.array([values.size, values.sum(), values @ values, errors @ errors, np.abs(errors).max(initial=0.0)])
    a, b = (np.concatenate([np.zeros(1), *(row[name].ravel() for name in expected)]) for row in (expected, actual))
    worst = int(np.abs(a - b).argmax())
    return RowError(request, len(encoding), float(a[worst]), float(b[worst]), float(np.abs(a).max()), sums)


def _describe(request: Any) -> str:
    """Returns the beginning of a request's texts, for a message."""
    texts = [getattr(request, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)


def measure_agreement(task: ExportTask, config: ModelConfig, expected: Sequence[Any], actual: Sequence[Any]) -> Agreement:
    """Returns the agreement of the graph's results `actual` with the reference's; without decisions it has no value."""
    measure, value, worst = task.measure(config), None, None
    pairs = [(task.decision(first, config), task.decision(second, config)) for first, second in zip(expected, actual, strict=True)]
    if measure == "spearman":
        # the scores of each label, of the reference and of the graph; the lowest correlation of a label counts
        by_label = zip(*(map(_rounded, zip(*scores, strict=True)) for scores in zip(*pairs, strict=True)), strict=True)
        # a reference with equal scores has no order; a graph with equal scores has lost the order, which is 0
        value = min((spearman(first, second) for first, second in by_label if len(set(first)) > 1), default=None)
    elif measure == "cosine" and pairs:
        cosines = [_cosine(*pair) for pair in pairs]
        value, worst = sum(cosines) / len(cosines), min(cosines)
    elif measure == "label" and pairs:
        value = sum(first == second for first, second in pairs) / len(pairs)
    elif measure in ("set_f1", "span_f1") and (pairs := [(a, b) for a, b in pairs if a or b]):
        value = f1(sum(len(a & b) for a, b in pairs), sum(len(b) for _, b in pairs), sum(len(a) for a, _ in pairs))
    return Agreement(measure=measure, value=value, decisions=0 if value is None else len(pairs), worst=worst)


def _rounded(scores: Sequence[float]) -> list[float]:
    """Returns scores in five digits, in which float32 agrees with PyTorch; ranks of closer scores, as near 1, are only rounding."""
    return [float(f"{score:.5g}") for score in scores]


def _cosine(a: Any, b: Any) -> float:
    """Returns the cosine of two vectors; for a text's token vectors, the lowest one of corresponding vectors."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return min(float(np.min((x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny))), 1.0)


def measure_row_errors(engine: Engine, precision: Precision, encodings: Sequence[Encoding], alone: Sequence[Row]) -> tuple[float, bool]:
    """Compares rows in batches with the same rows run alone, without those over `MAX_TOKENS`; neighbors share batches.

    It returns the largest difference of an output, and whether all are rounding, so that the graph is batch-invariant.
    """
    rows = [pair for pair in zip(encodings, alone, strict=True) if len(pair[0]) <= MAX_TOKENS]
    assert len(rows) > 1, "a batch has several rows"

    def run_batch(start: int) -> list[RowError]:
        part = rows[start : start + BATCH_ROWS]
        together = engine.run([encoding for encoding, _ in part])
        return [row_error(None, encoding, single, row) for (encoding, single), row in zip(part, together, strict=True)]

    batches = progress.each(run_batch, range(0, len(rows), BATCH_ROWS))
    errors = [(row.error, row.error / max(row.largest, TRAINED_LARGEST)) for batch in batches for row in batch]
    worst, scaled = np.max(errors, axis=0).tolist()  # `max` may ignore a NaN
    share = np.mean([not error <= MAX_ROW_ERROR / TRAINED_LARGEST for _, error in errors])
    bound = MAX_ROW_ERROR if precision == "fp32" else MAX_ROW_ERROR_FP16
    return worst, bool(scaled <= bound / TRAINED_LARGEST and (precision != "int8" or share <= MAX_INT8_SHARE))
