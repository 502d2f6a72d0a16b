"""The manifest's description of a graph."""

import hashlib
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from bertserve.service.bundle.calibration import Calibration
from bertserve.service.bundle.record import Record
from bertserve.service.providers import Provider, split_into_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray  # the parent of workers must not import numpy

Outputs: TypeAlias = "dict[str, NDArray[Any]]"  # a graph's outputs for one encoding by name, float32, or the parts that a task keeps


class ShapeBucket(Record):
    """A length to which rows are padded, and the numbers of rows to which its batches are filled up, ascending."""

    length: Annotated[int, Field(ge=1)]
    rows: Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class ShapePlan(Record):
    """The only shapes in which a graph runs: the shapes of its warm-up, of its TensorRT engines and of its batches."""

    buckets: Annotated[tuple[ShapeBucket, ...], Field(strict=False, min_length=1)]
    masks: Annotated[tuple[int, ...], Field(strict=False)] = ()

    @property
    def all_shapes(self) -> list[tuple[int, int]]:
        """All `(rows, length)`, the largest first, because the others can then reuse its memory."""
        return sorted(
            ((rows, b.length) for b in self.buckets for rows in b.rows), key=lambda shape: (shape[0] * shape[1], shape), reverse=True
        )

    def padded_shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the smallest `(rows, length)` for a batch, or None if the batch has more rows than any planned batch of its length.

        `tokens` counts its longest row and one more for each mask, so it can exceed the last length; the last bucket is used then.
        """
        bucket = self.buckets[min(bisect_left(self.buckets, tokens, key=lambda b: b.length), len(self.buckets) - 1)]
        i = bisect_left(bucket.rows, rows)
        return (bucket.rows[i], bucket.length) if i < len(bucket.rows) else None

    def split(self, parts: int) -> "list[ShapePlan]":
        """Returns at most `parts` plans of consecutive lengths, the shortest first."""
        return [ShapePlan(buckets=tuple(buckets), masks=self.masks) for buckets in split_into_ranges(self.buckets, parts)]

    def within(self, tokens: int) -> "ShapePlan":
        """Returns the plan without shapes of more than `tokens` padded tokens; every length keeps its smallest number of rows."""
        return ShapePlan(
            buckets=tuple(
                ShapeBucket(length=b.length, rows=tuple(n for n in b.rows if n == b.rows[0] or n * b.length <= tokens))
                for b in self.buckets
            ),
            masks=self.masks,
        )


Precision = Literal["fp32", "fp16", "int8"]
Measure = Literal["label", "set_f1", "span_f1", "cosine", "spearman"]


class InputSpec(Record):
    """A graph input and its content.

    Its shape is [rows, length], except for three inputs: `mask_index` is [masks], flat positions row * length + position of the masks;
    `lengths` is [rows], the tokens of each row, for graphs with padding on the right and without a mask input;
    `attention_index` is [maps, 3], layer, row and head of each requested attention map, ascending.
    """

    name: str
    fill: Literal["token_ids", "attention_mask", "type_ids", "mask_index", "lengths", "attention_index"]
    dtype: Literal["int64", "int32"] = "int64"


class OutputSpec(Record):
    """A graph output, float32 or float16, and its shape by kind.

    `per_text` is [rows, values], `per_token` [rows, length] or [rows, length, values], `per_mask` [masks, values], `per_map`
    [maps, length, length].
    """

    name: str
    kind: Literal["per_text", "per_token", "per_mask", "per_map"]


class LengthParity(Record):
    """The largest errors of the parity rows in a range of lengths."""

    up_to: int
    rows: int
    worst_abs_error: float
    worst_rel_error: float


class Timing(Record):
    """The duration of a run: the median in milliseconds for one text of `length` tokens."""

    length: int
    median_ms: float


class Speed(Record):
    """Measured durations, with the machine."""

    cpu: str
    instructions: Annotated[tuple[str, ...], Field(strict=False)]
    threads: int
    timings: Annotated[tuple[Timing, ...], Field(strict=False)]


class Agreement(Record):
    """The agreement of a graph's decisions with its checkpoint's, by the measure for its kind of head."""

    measure: Measure
    value: float | None
    decisions: Annotated[int, Field(ge=0)]
    worst: float | None = None

    @model_validator(mode="after")
    def _value_needs_decisions(self) -> Self:
        if (self.value is None) != (self.decisions == 0):
            raise ValueError(f"`value` must be null if and only if `decisions` is 0, not {self.value} with {self.decisions}")
        return self


class ValidationReport(Record):
    """Measurements at the export of this graph."""

    samples: int
    worst_abs_error: float
    worst_batch_error: float
    nodes: int
    fusions: dict[str, int]
    quantized: dict[str, int]
    quantization_error: float = 0.0
    quantization_limit: float = 0.0
    provider: Provider = "cpu"
    opset: int | None = None
    lengths: Annotated[tuple[LengthParity, ...], Field(strict=False)] = ()
    longest: int | None = None
    speed: Speed | None = None
    attention_error: float | None = None
    agreement: Agreement | None = None


# Outputs of a graph for each mask: its best tokens, int64, and the logarithms of their probabilities, falling: for `TOP_TOKENS` tokens,
# or for the whole vocabulary if it is smaller.
TOP_TOKENS_OUTPUT, TOP_LOG_PROBS_OUTPUT = "top_tokens", "top_logs"
TOP_TOKENS = 100

# a name within the bundle, which cannot lead out of its folder
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]  # not a path, and without characters that file systems refuse


class GraphFile(Record):
    """A file of a graph: its name within the bundle, its digest, and its size, which is null if not recorded."""

    file: FileName
    sha256: str
    size_bytes: int | None = None


class GraphSpec(Record):
    """An ONNX graph of the bundle."""

    file: FileName
    sha256: str
    provider: Provider
    precision: Precision
    description: str
    default: bool
    batch_invariant: bool
    inputs: Annotated[tuple[InputSpec, ...], Field(strict=False, min_length=1)]
    outputs: Annotated[tuple[OutputSpec, ...], Field(strict=False, min_length=1)]
    # computed from `outputs` in the graph; a run returns them instead of `outputs` if they are sufficient for all its texts
    small_outputs: Annotated[tuple[OutputSpec, ...], Field(strict=False)] = ()
    validation: ValidationReport
    shapes: ShapePlan | None = None
    size_bytes: int | None = None
    data: Annotated[tuple[GraphFile, ...], Field(strict=False)] = ()
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        """Its provider and precision, such as `cpu/int8`."""
        return f"{self.provider}/{self.precision}"

    @property
    def has_attentions(self) -> bool:
        """Whether attention maps are an output."""
        return any(output.kind == "per_map" for output in self.outputs)

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """All files of the graph, its own first."""
        return (GraphFile(file=self.file, sha256=self.sha256, size_bytes=self.size_bytes), *self.data)

    @property
    def identity(self) -> str:
        """A digest over all files; for a graph in one file, that file's digest."""
        return hashlib.sha256("".join(file.sha256 for file in self.files).encode()).hexdigest() if self.data else self.sha256

    def padded_shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the `(rows, length)` of a batch's run, or None if the batch has more rows than can run at once.

        `tokens` is the length of its longest row.
        """
        return (rows, tokens) if self.shapes is None else self.shapes.padded_shape(rows, tokens)
