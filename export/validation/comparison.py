"""The comparison of a graph with a reference, which is the checkpoint in PyTorch or the bundle's float32 graph, and its bounds.

It is used at export, by `verify --checkpoint` and by `verify --data`. The bounds depend only on the graph's entry in the manifest, so that
`verify` accepts on the same inputs what the export accepted.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertserve.export.errors import ExportError, first_line
from bertserve.export.progress import parallel_map
from bertserve.export.validation.served_graph import ModelAnswer, ServedGraph, measure_latency, open_graph
from bertserve.service.bundle.graph_spec import Agreement, GraphSpec, LengthParity, Outputs, Precision
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.tasks import attention
from bertserve.service.tasks.step import TaskModel, TextInput
from bertserve.service.text.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from bertserve.export.checkpoint.checkpoint import Checkpoint

# Maximum difference of a logit from the reference, by precision, for a row whose largest logit is at most TRAINED_LARGEST, a usual value of
# trained heads. It grows with larger logits, as rounding errors do: a model without a norm before its head can have logits of hundreds.
# For float32, the difference was at most 3e-6 of the largest logit on five trained checkpoints, and 1e-5 on random ones with logits from 1
# to 1e12 (bench/results/2026-11-21-int8-steps.md).
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1}
TRAINED_LARGEST = 5
# Maximum error of int8 on ordinary texts, relative to the standard deviation of the reference's outputs: root mean square, and largest.
# The gate decides about the quality of int8; this check ensures that the served graph is the one of the gate
# (bench/results/2026-11-21-int8-steps.md).
MAX_INT8_RMS, MAX_INT8_WORST = 0.1, 3.0
INT8_SLACK = 2  # factor for the gate's error, if that allows more
MAX_ATTENTION_ERROR = 1e-4  # maximum error of an attention weight, which is from 0 to 1, in float32
# A graph with a larger difference between a row in a batch and the single row is not batch-invariant, and the service runs it one text
# at a time. fp16 has ten bits, and rounding can depend on the kernel for a batch's shape. int8 with static scales gives a row the same
# numbers in a batch, unless a value is so close to a rounding boundary that the last bit of a float32 sum decides. This happens to few
# rows, while dynamic scales, which depend on the batch, change nearly all.
MAX_BATCH_ERROR, MAX_BATCH_ERROR_FP16, MAX_INT8_SHARE = 1e-5, 2e-2, 0.05


@dataclass(frozen=True)
class Reference:
    """The expected answers that graphs are compared with.

    Attributes:
        name: Its name in reports; empty if it has no answers, so that only rows in batches are compared with single rows.
        inputs: The fixed samples for graphs of each precision, and then ordinary texts for int8.
        predictions: Its answer to each input, or None.
        fixed_count: Number of the fixed samples.
        predict: Returns its answer to another input. It raises EngineError if it has none.
        graphs: The graphs whose answers these are; empty for the checkpoint.
        maps: Requests for attention with their weights, float32 [maps, length, length].
    """

    name: str
    inputs: Sequence[Any]
    predictions: Sequence[ModelAnswer | None]
    fixed_count: int
    predict: Callable[[Any], ModelAnswer | None] = lambda input_: None
    graphs: Sequence[ServedGraph] = ()
    maps: Sequence[tuple[TextInput[attention.Maps], NDArray[np.float32]]] = ()


class OutputSums(NamedTuple):
    """Sums over the values of an output in a row. The values themselves would need gigabytes for fill-mask.

    Attributes:
        values: Number of the reference's values.
        total: Their sum.
        squares: The sum of their squares.
        error_squares: The sum of the squared differences from them.
        error: The largest difference.
    """

    values: int
    total: float
    squares: float
    error_squares: float
    error: float


class RowDifference(NamedTuple):
    """The difference of a row of outputs from the reference's.

    Attributes:
        error: The largest difference.
        largest: The reference's largest magnitude.
        sums: By the name of an output.
        input: The input of the row; None for a row in a batch.
    """

    error: float
    largest: float
    tokens: int
    sums: Mapping[str, OutputSums]
    input: Any = None

    @classmethod
    def of(cls, encoding: Encoding, expected: Outputs, actual: Outputs, input_: Any = None) -> "RowDifference":
        """Returns the difference of two rows with the same shapes."""
        sums = {}
        for name, output in expected.items():
            values = output.astype(np.float64).ravel()
            errors = actual[name].astype(np.float64).ravel() - values
            error = float(np.abs(errors).max(initial=0.0))
            sums[name] = OutputSums(values.size, float(values.sum()), float(values @ values), float(errors @ errors), error)
        worst = np.max([0.0, *(part.error for part in sums.values())])  # Python's `max` can ignore a NaN
        largest = np.max([0.0, *(np.abs(output).max(initial=0.0) for output in expected.values())])
        return cls(float(worst), float(largest), len(encoding), sums, input_)

    @property
    def scaled_error(self) -> float:
        """The largest difference, smaller for a row with a largest output above `TRAINED_LARGEST`; infinite if it is not finite."""
        scaled = self.error / max(1.0, self.largest / TRAINED_LARGEST)
        return scaled if math.isfinite(scaled) else math.inf


def rms_and_worst_error(rows: Sequence[RowDifference], baseline: Sequence[RowDifference] = ()) -> tuple[float, float]:
    """Returns the root mean square and the largest error of the worst output; 0 without values, and NaN if an error is NaN.

    They are relative to the standard deviation of the reference's outputs for `rows`, or for `baseline` if it is larger.
    """
    errors = [(0.0, 0.0)]
    for name in rows[0].sums if rows else ():
        sums = [row.sums[name] for row in rows]
        deviation = max(_standard_deviation(sums), _standard_deviation([row.sums[name] for row in baseline]), 1e-12)
        mean_square = sum(part.error_squares for part in sums) / max(sum(part.values for part in sums), 1)
        errors.append((math.sqrt(mean_square) / deviation, np.max([part.error for part in sums]) / deviation))
    rms, worst = np.max(errors, axis=0).tolist()
    return rms, worst


def _standard_deviation(sums: Sequence[OutputSums]) -> float:
    count = max(sum(part.values for part in sums), 1)
    mean = sum(part.total for part in sums) / count
    return math.sqrt(max(sum(part.squares for part in sums) / count - mean**2, 0.0))


class Comparison:
    """The comparison of one graph with a reference: first on samples, for int8 also on ordinary texts, and then on other inputs.

    `expected` is empty without a reference, and for the reference's own graph.
    """

    def __init__(self, served: ServedGraph, reference: Reference) -> None:
        """Compares the samples, rows in batches with single rows, and attention; the caller checks the bounds.

        Raises:
            ExportError: The graph fails on a sample, or has outputs of another shape.
            BertServeError: The graph cannot answer a sample.
        """
        self.served, self.reference = served, reference
        self.is_reference = served in reference.graphs
        self.results, self.expected = list[Any](), list[Any]()
        self._samples, self._texts = list[RowDifference](), list[RowDifference]()
        inputs = reference.inputs if served.graph.precision == "int8" else reference.inputs[: reference.fixed_count]
        predictions = parallel_map(partial(predict_sample, served), inputs, "compare answers", unit="samples")
        alone = list[tuple[Encoding, Outputs]]()
        for prediction, input_, expected in zip(predictions, inputs, reference.predictions, strict=False):
            self.add(input_, prediction, expected)
            alone += zip(prediction.encodings, prediction.rows, strict=True)
        self.worst_batch_error, self.batch_invariant = _measure_batch_error(served, alone)
        attention_errors = [_attention_error(served, *weights) for weights in reference.maps]
        self.attention_error = float(np.max(attention_errors)) if attention_errors else None

    def add(self, input_: Any, actual: ModelAnswer, expected: ModelAnswer | None) -> None:
        """Adds the graph's answer to an input, and its difference from the reference's; if that has only outputs, they are decoded.

        Raises:
            ExportError: Their numbers or shapes differ.
            EngineError: The outputs cannot be decoded.
        """
        if expected is not None and not self.is_reference:
            shapes = [[{name: value.shape for name, value in row.items()} for row in side.rows] for side in (expected, actual)]
            if shapes[0] != shapes[1]:
                raise ExportError(
                    f"{len(shapes[1])} windows, with the shapes {shapes[1]}, but the reference has {shapes[0]} for {len(shapes[0])}: "
                    f"{_describe(input_)}."
                )
            rows = self._samples if len(self.results) < self.reference.fixed_count else self._texts
            rows += [RowDifference.of(*row, input_) for row in zip(actual.encodings, expected.rows, actual.rows, strict=True)]
            self.expected.append(self.served.decode(input_, expected.rows) if expected.result is None else expected.result)
        self.results.append(actual.result)

    def agreement(self, start: int = 0) -> Agreement:
        """Returns the agreement on the inputs from `start` on."""
        return self.served.task.agreement(self.expected[start:], self.results[start:], self.served.config)

    def worst_difference(self, start: int) -> float:
        """Returns the largest difference of a value of a regression on the inputs from `start` on."""
        task, config = self.served.task, self.served.config
        values = [[task.compared_value(result, config) for result in results[start:]] for results in (self.expected, self.results)]
        return float(np.abs(np.diff(values, axis=0)).max())

    def measured(self) -> dict[str, Any]:
        """Returns the fields of a `ValidationReport` that this comparison measures."""
        rows = self._samples + self._texts
        lengths = _errors_by_length(rows, self.served.tokenizer.spec.max_length)
        return {
            "samples": len(self.results),
            "worst_abs_error": max((entry.worst_abs_error for entry in lengths), default=0.0),
            "worst_batch_error": self.worst_batch_error,
            "agreement": self.agreement(),
            "lengths": lengths,
            "longest": max((row.tokens for row in rows), default=0),
            "attention_error": self.attention_error,
            "provider": self.served.provider,
        }

    def check(self) -> None:
        """Checks the bounds of the graph's precision.

        Raises:
            ExportError: An error exceeds its bound; the message has the worst case.
        """
        precision = self.served.graph.precision
        worst = max(self._samples + self._texts, key=lambda row: row.scaled_error, default=None)
        if worst is not None and precision == "int8":
            self._check_int8(_describe(worst.input))
        elif worst is not None and worst.scaled_error > MAX_ABS_ERROR[precision]:
            raise ExportError(
                f"{precision} outputs differ by {worst.error:.2e}, over the limit of {MAX_ABS_ERROR[precision]:.0e} or "
                f"{MAX_ABS_ERROR[precision] / TRAINED_LARGEST:.0e} of the row's largest output, which is {worst.largest:.3g}: "
                f"{_describe(worst.input)}."
            )
        if precision == "fp32" and self.attention_error is not None and not self.attention_error <= MAX_ATTENTION_ERROR:
            raise ExportError(
                f"fp32 attention weights differ by {self.attention_error:.2e}, over {MAX_ATTENTION_ERROR:.0e}; export it without "
                "--attentions."
            )

    def _check_int8(self, worst: str) -> None:
        """Refuses an int8 graph that differs from the reference by more than the gate's error explains; `worst` is the worst text."""
        report = self.served.graph.validation
        limit = max(MAX_INT8_RMS, INT8_SLACK * report.quantization_error, report.quantization_limit)
        largest = limit * MAX_INT8_WORST / MAX_INT8_RMS
        # a root mean square of few texts is not reliable
        max_text_rms = limit if len(self._texts) >= len(self._samples) else math.inf
        # texts can all have the same label, so their outputs can all be equal
        text_errors = rms_and_worst_error(self._texts, self._samples)
        # twice the limit for the fixed samples, which are more unusual than ordinary texts
        for (rms, error), max_rms in ((rms_and_worst_error(self._samples), 2 * limit), (text_errors, max_text_rms)):
            if not (rms <= max_rms and error <= largest):  # not `>`, which is false for NaN
                raise ExportError(
                    f"int8 outputs differ by {rms:.2g} of their standard deviation, and at worst by {error:.2g}, over the limits of "
                    f"{max_rms:.2g} and {largest:.2g}: {worst}; export again with texts of the model's domain in --int8-texts, or with a "
                    "lower --max-int8-error."
                )


def measure_graph(folder: Path, graph: GraphSpec, checkpoint: "Checkpoint", tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Compares a graph with its checkpoint, and times it; returns its manifest entry with a new validation report.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same.
    """
    spec = checkpoint.tokenizer
    try:
        served = open_graph(folder, graph, tokenizer, checkpoint)
        comparison = Comparison(served, reference)
        comparison.check()
    except BertServeError as error:
        raise ExportError(
            f"{type(checkpoint.model).__name__} is not supported: its {graph.precision} graph cannot be served. {error}"
        ) from error
    updates = comparison.measured() | {"speed": measure_latency(served.engine, max_length=spec.max_length, pad_id=spec.pad_id)}
    report = graph.validation.model_copy(update=updates)
    return graph.model_copy(update={"validation": report, "batch_invariant": comparison.batch_invariant})


def _attention_error(served: ServedGraph, input_: TextInput[attention.Maps], weights: NDArray[np.float32]) -> float:
    [encoding] = next(attention.read_attention(input_, TaskModel(served.tokenizer, served.config))).encodings
    if weights.shape[-1] != len(encoding):
        raise ExportError(f"a text has {len(encoding)} tokens, but {weights.shape[-1]} with the checkpoint's tokenizer.")
    [row] = served.engine.run([encoding])
    return float(np.abs(row[attention.OUTPUT] - weights).max())


def _measure_batch_error(served: ServedGraph, alone: Sequence[tuple[Encoding, Outputs]]) -> tuple[float, bool]:
    """Compares rows in batches of four neighbors with the same rows run one by one.

    Returns:
        The largest difference of an output, and whether all are rounding, so that the graph is batch-invariant.
    """
    rows = [pair for pair in alone if len(pair[0]) <= 2048]  # attention of a batch of longer rows would need gigabytes
    assert len(rows) > 1, "a batch has several rows"

    def run_batch(start: int) -> list[RowDifference]:
        neighbors = rows[start : start + 4]
        together = served.engine.run([encoding for encoding, _ in neighbors])
        return [RowDifference.of(*pair, row) for pair, row in zip(neighbors, together, strict=True)]

    differences = [difference for batch in parallel_map(run_batch, range(0, len(rows), 4)) for difference in batch]
    worst = float(np.max([difference.error for difference in differences]))  # `max` can ignore a NaN
    scaled_errors = [difference.scaled_error for difference in differences]
    largest, share = max(scaled_errors), np.mean([error > MAX_BATCH_ERROR for error in scaled_errors])
    precision = served.graph.precision
    bound = MAX_BATCH_ERROR if precision == "fp32" else MAX_BATCH_ERROR_FP16
    return worst, bool(largest <= bound and (precision != "int8" or share <= MAX_INT8_SHARE))


def predict_sample(served: ServedGraph, input_: Any) -> ModelAnswer:
    """Returns a graph's answer to a sample."""
    try:
        return served.predict(input_)
    except EngineError as error:
        reason = first_line(error.__cause__ or error)[:300]
        # a traced graph cannot follow code that depends on the length or the values of a text
        raise ExportError(f"the graph fails on a text that its reference answers: {_describe(input_)}. {reason}") from error


def _describe(input_: Any) -> str:
    texts = [getattr(input_, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)


def _errors_by_length(rows: Sequence[RowDifference], max_length: int) -> tuple[LengthParity, ...]:
    """Returns the largest absolute and relative errors of rows by their length: up to 16 tokens, and in ranges twice as long each."""
    ranges = defaultdict[int, list[RowDifference]](list)
    for row in rows:
        up_to = max(16, 2 ** (row.tokens - 1).bit_length())
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
