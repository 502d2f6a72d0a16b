"""One graph of a bundle as the manifest describes it: what it takes and gives out, and what was measured when it was exported."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bertserve.service.providers import Provider


class Record(BaseModel):
    """Base of all manifest records: frozen, and an unknown or mistyped field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShapeBucket(Record):
    """A length that rows are padded to, and the row counts that batches of it are filled up to, ascending."""

    length: Annotated[int, Field(ge=1)]
    rows: Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class ShapePlan(Record):
    """The only shapes that a graph is run in: what its warm-up runs, what its profiles span, what the scheduler makes batches for.

    Attributes:
        buckets: Ascending by length; the last length is the model's usable one. A longer bucket has no more rows than a shorter one.
        masks: Counts that `mask_index` is filled up to, ascending; empty for graphs without that input.
    """

    buckets: Annotated[tuple[ShapeBucket, ...], Field(strict=False, min_length=1)]
    masks: Annotated[tuple[int, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _in_order(self) -> ShapePlan:
        lengths = [bucket.length for bucket in self.buckets]
        for name, values in (("lengths", lengths), *(("rows", bucket.rows) for bucket in self.buckets), ("masks", self.masks)):
            if list(values) != sorted(set(values)) or min(values, default=1) < 1:
                raise ValueError(f"{name} of a shape plan must be ascending numbers of at least 1, not {list(values)}")
        most = [bucket.rows[-1] for bucket in self.buckets]
        if most != sorted(most, reverse=True):
            raise ValueError(f"a longer bucket of a shape plan must not have more rows than a shorter one: {most}")
        return self

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All `(rows, length)`, the largest first: memory that it takes then serves the others."""
        return sorted(
            ((rows, b.length) for b in self.buckets for rows in b.rows), key=lambda shape: (shape[0] * shape[1], shape), reverse=True
        )

    def shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the least `(rows, length)` that holds a batch, or None where it has more rows than any of its length.

        Args:
            rows: Rows of the batch.
            tokens: Its longest row; over the last length it counts as that, for masks to fill count as tokens.
        """
        bucket = self.buckets[min(bisect_left(self.buckets, tokens, key=lambda b: b.length), len(self.buckets) - 1)]
        i = bisect_left(bucket.rows, rows)
        return (bucket.rows[i], bucket.length) if i < len(bucket.rows) else None

    def within(self, tokens: int) -> ShapePlan:
        """Returns the plan without shapes of more than `tokens` padded tokens; every length keeps its least rows."""
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
    """One graph input and what fills it.

    [rows, length], but for `mask_index`: [masks], flat positions row * length + position of the masks to fill; for `lengths`:
    [rows], the tokens of each row, for graphs whose padding is on the right and that take no mask; and for `attention_index`:
    [maps, 3], layer, row and head of each attention map to give out, ascending.
    """

    name: str
    fill: Literal["token_ids", "attention_mask", "type_ids", "mask_index", "lengths", "attention_index"]
    dtype: Literal["int64", "int32"] = "int64"


class OutputSpec(Record):
    """One graph output, float32, and the shape that its kind means.

    `per_text` is [rows, values], `per_token` [rows, length] or [rows, length, values], `per_mask` [masks, values], `per_map`
    [maps, length, length].
    """

    name: str
    kind: Literal["per_text", "per_token", "per_mask", "per_map"]


class LengthParity(Record):
    """The worst errors over the parity rows of a range of lengths.

    Attributes:
        up_to: Longest rows of the range in tokens; it begins where the one before ends.
        rows: Number of rows, which are texts or windows.
        worst_abs_error: Largest absolute difference of a logit to the checkpoint in PyTorch, float32.
        worst_rel_error: Largest difference of a row over the row's largest logit.
    """

    up_to: int
    rows: int
    worst_abs_error: float
    worst_rel_error: float


class Timing(Record):
    """How long a run takes: the median in milliseconds of one text of `length` tokens alone."""

    length: int
    median_ms: float


class Speed(Record):
    """What was timed, and where.

    Attributes:
        cpu: The processor's name.
        instructions: Those of its instruction sets that decide how fast matrices are multiplied.
        threads: Threads of a run.
        timings: By length.
    """

    cpu: str
    instructions: Annotated[tuple[str, ...], Field(strict=False)]
    threads: int
    timings: Annotated[tuple[Timing, ...], Field(strict=False)]


class Agreement(Record):
    """How closely a graph decides as its checkpoint does, by the measure of its kind of head.

    Attributes:
        measure: `label`: share of inputs with the same best label, answer, choice or tokens. `set_f1`: F1 of the chosen labels of a head
            with independent labels. `span_f1`: F1 of the entities. `cosine`: mean cosine similarity of the vectors. `spearman`: rank
            correlation of the scores of a head with one score.
        value: The value, 1 for full agreement; null where the inputs left nothing to decide.
        decisions: Inputs that the value is measured on: for sets and spans those with at least one on either side; 0 where the value is
            null. Null where an older export did not record it.
        worst: Lowest cosine similarity of an input; null for other measures.
    """

    measure: Measure
    value: float | None
    decisions: Annotated[int, Field(ge=0)] | None
    worst: float | None = None

    @model_validator(mode="after")
    def _rests_on_decisions(self) -> Agreement:
        if (self.value is None) != (self.decisions == 0):
            raise ValueError(f"`value` must be null if and only if `decisions` is 0, not {self.value} with {self.decisions}")
        return self


class ValidationReport(Record):
    """What was measured when this graph was exported.

    Attributes:
        samples: Number of parity inputs.
        worst_abs_error: Largest absolute difference of a logit to the checkpoint in PyTorch, float32.
        label_agreement: Share of parity inputs whose best label, answer, choice or tokens are the checkpoint's; null where the agreement
            has another measure. Manifests without `agreement` have a number here for every model.
        worst_row_error: Largest absolute difference of a logit between a text in a batch and the same text alone.
        nodes: Nodes of the graph.
        fusions: Fused operator -> count, as ONNX Runtime's optimizer reports them.
        quantized: Quantized operator -> count, and what was kept in float; empty for a float graph.
        quantization_error: Root mean square difference of the outputs from the float graph's, over their standard deviation: of int8
            on the gate texts, of fp16 on the calibration texts.
        provider: Execution provider that all this was measured on: the CPU where there was none that the graph was made for.
        opset: Version of ONNX's own operators, or null where that was not recorded.
        worst_rel_error: Largest difference of a row's logits over the row's largest one, or null where that was not recorded.
        spans: Entities or answers that the checkpoint gives on the parity inputs; 0 for tasks without spans.
        span_agreement: F1 of the graph's spans against the checkpoint's, equal in place and label; null for tasks without spans.
        lengths: The worst errors by length; empty where they were not recorded.
        longest: Tokens of the longest parity row, or null where that was not recorded.
        speed: How long a run takes, or null where that was not timed.
        attention_error: Largest absolute difference of an attention weight to the checkpoint's, or null where the graph gives none out.
        agreement: How closely the graph decides as its checkpoint, or null where that was not measured.
    """

    samples: int
    worst_abs_error: float
    label_agreement: float | None
    worst_row_error: float
    nodes: int
    fusions: dict[str, int]
    quantized: dict[str, int]
    quantization_error: float = 0.0
    provider: Provider = "cpu"
    opset: int | None = None
    worst_rel_error: float | None = None
    spans: int = 0
    span_agreement: float | None = None
    lengths: Annotated[tuple[LengthParity, ...], Field(strict=False)] = ()
    longest: int | None = None
    speed: Speed | None = None
    attention_error: float | None = None
    agreement: Agreement | None = None


# within the bundle: no path leads out of its folder
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]  # no path, and no character that no file name has


class GraphFile(Record):
    """A file of a graph: its name within the bundle, its digest, and its size, or null where that was not recorded."""

    file: FileName
    sha256: str
    size_bytes: int | None = None


class GraphSpec(Record):
    """One ONNX graph of the bundle.

    Attributes:
        file: File name within the bundle.
        sha256: Digest of the file.
        size_bytes: Its size, or null where that was not recorded.
        data: Further files, of weights, which the graph knows by name; none where it is one file, as it is up to 2 GiB.
        provider: Execution provider that the graph was made for.
        precision: Number format that it computes in.
        form: How the graph was made, for the reader.
        default: Whether the service takes it for its provider when not told otherwise.
        batch_invariant: Whether a text's scores are the same whatever shares its batch.
        shapes: The only shapes that it is run in; null for graphs that are run in any, padded to the longest text.
    """

    file: FileName
    sha256: str
    provider: Provider
    precision: Precision
    form: str
    default: bool
    batch_invariant: bool
    inputs: Annotated[tuple[InputSpec, ...], Field(strict=False, min_length=1)]
    outputs: Annotated[tuple[OutputSpec, ...], Field(strict=False, min_length=1)]
    evidence: ValidationReport
    shapes: ShapePlan | None = None
    size_bytes: int | None = None
    data: Annotated[tuple[GraphFile, ...], Field(strict=False)] = ()

    @property
    def measured_as(self) -> tuple[Provider, Precision]:
        """The provider that the validation report was measured on, and the precision that it computed in: a CPU computes fp16 graphs in fp32."""
        on = self.evidence.provider
        return on, "fp32" if on == "cpu" and self.precision == "fp16" else self.precision

    @property
    def gives_attentions(self) -> bool:
        """Whether it gives out attention maps."""
        return any(output.kind == "per_map" for output in self.outputs)

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """All files of the graph, its own first."""
        return (GraphFile(file=self.file, sha256=self.sha256, size_bytes=self.size_bytes), *self.data)

    @property
    def identity(self) -> str:
        """A digest over all files: of a graph in one file, that file's."""
        return hashlib.sha256("".join(file.sha256 for file in self.files).encode()).hexdigest() if self.data else self.sha256

    @model_validator(mode="after")
    def _plans_what_it_takes(self) -> GraphSpec:
        takes = any(spec.fill == "mask_index" for spec in self.inputs)
        if self.shapes is not None and bool(self.shapes.masks) != takes:
            raise ValueError(f"`masks` of `shapes` must be given if and only if an input is `mask_index`, not {list(self.shapes.masks)}")
        return self

    def shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the `(rows, length)` that a batch is run at, or None where it has more rows than may run at once.

        Args:
            rows: Rows of the batch.
            tokens: Its longest row.
        """
        return (rows, tokens) if self.shapes is None else self.shapes.shape(rows, tokens)
