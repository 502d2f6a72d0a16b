"""The contract on disk between the exporter and the service: the manifest's schema, file names, loading, verifying.

A bundle is a folder `models/<name>/` with `manifest.json`, `tokenizer.json`, `README.md` and one or more graphs. What the
service must know about a model stands in the manifest; nothing else is looked at, and nothing is guessed. The
field-by-field specification is `models/README.md`. This module opens no ONNX file: that is the engine's.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from service.errors import BundleError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CARD_FILE = "README.md"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

Task = Literal["text-classification", "token-classification", "question-answering", "fill-mask", "feature-extraction"]
Provider = Literal["cpu", "cuda", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8"]
Activation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["none", "cls", "mean", "max"]
Layers = Literal["last", "last_four"]


class Record(BaseModel):
    """Base of all manifest records: frozen, and an unknown or mistyped field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SpecialPiece(Record):
    """A special token at a fixed place of the template."""

    special: str
    id: Annotated[int, Field(ge=0)]
    type_id: Annotated[int, Field(ge=0)]


class TextPiece(Record):
    """The place of the first (`a`) or the second text (`b`) in the template."""

    text: Literal["a", "b"]
    type_id: Annotated[int, Field(ge=0)]


Piece = SpecialPiece | TextPiece


class MaskToken(Record):
    """The token that stands for a word to be filled in; a text spells it like this."""

    token: str
    id: Annotated[int, Field(ge=0)]


class TokenizerSpec(Record):
    """How texts become token ids, beside `tokenizer.json` itself.

    Attributes:
        sha256: Digest of `tokenizer.json`.
        max_length: Usable length in tokens, special tokens counted.
        pad_id: Token id that fills the padding.
        padding_side: Where padding goes.
        single: Template of one text.
        pair: Template of a pair of texts.
        cls_index: Where [CLS] stands in both templates, -1 for their end, or null.
        subword_prefix: What begins a token that continues a word; null where a word begins after white space instead.
        mask: The mask token, for fill-mask.
    """

    sha256: str
    max_length: Annotated[int, Field(ge=3)]
    pad_id: Annotated[int, Field(ge=0)]
    padding_side: Literal["left", "right"]
    single: Annotated[tuple[Piece, ...], Field(strict=False)]
    pair: Annotated[tuple[Piece, ...], Field(strict=False)]
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None


class InputSpec(Record):
    """One graph input and what fills it.

    [rows, length], but for `mask_index`: [masks], flat positions row * length + position of the masks to fill; and for `lengths`:
    [rows], the tokens of each row, for graphs whose padding is on the right and that take no mask.
    """

    name: str
    fill: Literal["token_ids", "attention_mask", "type_ids", "mask_index", "lengths"]
    dtype: Literal["int64", "int32"] = "int64"


class OutputSpec(Record):
    """One graph output, float32, and the shape that its kind means.

    `per_text` is [rows, values], `per_token` [rows, length] or [rows, length, values], `per_mask` [masks, values].
    """

    name: str
    kind: Literal["per_text", "per_token", "per_mask"]


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
                raise ValueError(f"{name} of a shape plan must ascend from 1 or more, not {list(values)}")
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


class Evidence(Record):
    """What was measured when this graph was exported.

    Attributes:
        samples: Number of parity inputs.
        worst_abs_error: Largest absolute difference of a logit to the checkpoint in PyTorch, float32.
        label_agreement: Share of parity inputs whose best label, entities, best answer or best token are the checkpoint's.
        worst_row_error: Largest absolute difference of a logit between a text in a batch and the same text alone.
        nodes: Nodes of the graph.
        fusions: Fused operator -> count, as ONNX Runtime's optimizer reports them.
        quantized: Quantized operator -> count, and what was kept in float; empty for a float graph.
        quantization_error: Root mean square difference of the outputs from the float graph's on calibration texts, over their
            standard deviation.
        provider: Execution provider that all this was measured on: the CPU where there was none that the graph was made for.
        opset: Version of ONNX's own operators, or null where that was not recorded.
        worst_rel_error: Largest difference of a row's logits over the row's largest one, or null where that was not recorded.
        spans: Entities or answers that the checkpoint gives on the parity inputs; 0 for tasks without spans.
        span_agreement: F1 of the graph's spans against the checkpoint's, equal in place and label; null for tasks without spans.
        lengths: The worst errors by length; empty where they were not recorded.
        speed: How long a run takes, or null where that was not timed.
    """

    samples: int
    worst_abs_error: float
    label_agreement: float
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
    speed: Speed | None = None


class GraphSpec(Record):
    """One ONNX graph of the bundle.

    Attributes:
        file: File name within the bundle.
        sha256: Digest of the file.
        provider: Execution provider that the graph was made for.
        precision: Number format that it computes in.
        form: How the graph was made, for the reader.
        default: Whether the service takes it for its provider when not told otherwise.
        batch_invariant: Whether a text's scores are the same whatever shares its batch.
        shapes: The only shapes that it is run in; null for graphs that are run in any, padded to the longest text.
    """

    file: str
    sha256: str
    provider: Provider
    precision: Precision
    form: str
    default: bool
    batch_invariant: bool
    inputs: Annotated[tuple[InputSpec, ...], Field(strict=False, min_length=1)]
    outputs: Annotated[tuple[OutputSpec, ...], Field(strict=False, min_length=1)]
    evidence: Evidence
    shapes: ShapePlan | None = None

    @model_validator(mode="after")
    def _plans_what_it_takes(self) -> GraphSpec:
        takes = any(spec.fill == "mask_index" for spec in self.inputs)
        if self.shapes is not None and bool(self.shapes.masks) != takes:
            raise ValueError(f"`masks` of `shapes` must be given exactly where an input is `mask_index`, not {list(self.shapes.masks)}")
        return self

    def shape(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """Returns the `(rows, length)` that a batch is run at, or None where it has more rows than may run at once.

        Args:
            rows: Rows of the batch.
            tokens: Its longest row.
        """
        return (rows, tokens) if self.shapes is None else self.shapes.shape(rows, tokens)


class Flops(Record):
    """Arithmetic of one run: a text of S tokens takes `linear * S + quadratic * S**2` floating point operations."""

    linear: Annotated[float, Field(gt=0)]
    quadratic: Annotated[float, Field(ge=0)]


class Embedding(Record):
    """What a text's vector is made of where a request does not say, and what a request may ask for.

    Attributes:
        pooling: How the tokens' vectors become one; padding never counts, special tokens do.
        normalize: Whether vectors have length 1.
        dimensions: Values of a vector of one layer.
        layers: `last_four` where the graphs also give out the last four layers side by side.
        prompts: Name -> what is put before a text of that kind.
        default_prompt: Name of the prompt of a request that names none, or null.
    """

    pooling: Pooling
    normalize: bool
    dimensions: Annotated[int, Field(gt=0)]
    layers: Layers = "last"
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class Example(Record):
    """A stored request body and the result that the default CPU graph gave at export, for `bert-serve check`."""

    request: dict[str, Any]
    result: Any


class Figure(Record):
    """A task figure measured on labeled data, of the checkpoint in PyTorch and of graphs by `provider/precision`."""

    name: str
    checkpoint: Annotated[float, Field(allow_inf_nan=False)]
    graphs: dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class Source(Record):
    """Where the bundle came from.

    Attributes:
        checkpoint: Name of the checkpoint's folder, or the hub id.
        revision: What was asked of the hub, or null.
        weights_sha256: Digest over the weight files.
        versions: Of the packages that exported it.
        commit: The hub's commit that was exported, or null for a local folder.
    """

    checkpoint: str
    revision: str | None
    weights_sha256: str
    versions: dict[str, str]
    commit: str | None = None


class Manifest(Record):
    """Everything the service has to know about a model. Version 1."""

    format: Literal["bertserve-bundle"]
    format_version: Literal[1]
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    task: Task
    labels: Annotated[tuple[str, ...], Field(strict=False)]
    activation: Activation
    embedding: Embedding | None = None
    tokenizer: TokenizerSpec
    flops: Flops
    graphs: Annotated[tuple[GraphSpec, ...], Field(strict=False, min_length=1)]
    example: Example
    figures: Annotated[tuple[Figure, ...], Field(strict=False)]
    source: Source

    @model_validator(mode="after")
    def _what_its_task_needs(self) -> Manifest:
        if self.task.endswith("-classification") and not self.labels:
            raise ValueError(f"`labels` must not be empty for {self.task}")
        if self.task == "fill-mask" and self.tokenizer.mask is None:
            raise ValueError("`tokenizer.mask` must not be null for fill-mask")
        if self.task == "question-answering" and self.tokenizer.cls_index is None:
            raise ValueError("`tokenizer.cls_index` must not be null for question-answering")
        if self.task == "feature-extraction" and self.embedding is None:
            raise ValueError("`embedding` must not be null for feature-extraction")
        return self

    @model_validator(mode="after")
    def _graphs_fit_the_tokenizer(self) -> Manifest:
        for graph in self.graphs:
            if self.tokenizer.padding_side == "left" and any(spec.fill == "lengths" for spec in graph.inputs):
                raise ValueError(f"`{graph.file}` takes `lengths`, which needs `tokenizer.padding_side` to be right")
            if graph.shapes is not None and graph.shapes.buckets[-1].length != self.tokenizer.max_length:
                raise ValueError(
                    f"the longest of the `shapes` of `{graph.file}` is {graph.shapes.buckets[-1].length}, and `tokenizer.max_length` is "
                    f"{self.tokenizer.max_length}"
                )
        return self

    @model_validator(mode="after")
    def _one_default_graph_per_provider(self) -> Manifest:
        defaults = [graph.provider for graph in self.graphs if graph.default]
        if sorted(defaults) != sorted({graph.provider for graph in self.graphs}):
            raise ValueError("each provider needs exactly one graph with `default: true`")
        return self


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle: every file that the manifest names exists and has the digest it should have."""

    path: Path
    manifest: Manifest
    version: str

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer file."""
        return self.path / TOKENIZER_FILE

    def graph(self, provider: Provider, precision: Precision | Literal["auto"] = "auto") -> GraphSpec:
        """Returns the graph for a provider: its default one, or the one of the given precision.

        Raises:
            BundleError: The bundle has no such graph; the message lists those it has.
        """
        for graph in self.manifest.graphs:
            if graph.provider == provider and (graph.default if precision == "auto" else graph.precision == precision):
                return graph
        have = ", ".join(f"{graph.provider}/{graph.precision}" for graph in self.manifest.graphs)
        raise BundleError(
            f"bundle `{self.manifest.name}` has no graph for provider `{provider}` and precision `{precision}`; it has "
            f"{have}. Choose another --provider or --precision, or export again with `bert-export --provider --precision`."
        )


def load(path: Path) -> Bundle:
    """Reads a bundle's manifest and verifies the digest of every file that it names.

    Args:
        path: The bundle's folder.

    Raises:
        BundleError: A file is missing or altered, or the manifest is not valid; the message names bundle and file.
    """
    try:
        raw = (path / MANIFEST_FILE).read_bytes()
        manifest = Manifest.model_validate_json(raw)
    except OSError as error:
        raise BundleError(f"`{path}` is not a bundle: {MANIFEST_FILE} cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BundleError(f"`{path / MANIFEST_FILE}` is not a version 1 manifest: {where}: {first['msg']}.") from error
    if manifest.name != path.name:
        raise BundleError(f"bundle `{path}` calls itself `{manifest.name}`; folder and name must be the same.")
    _verify(path / TOKENIZER_FILE, manifest.tokenizer.sha256)
    for graph in manifest.graphs:
        _verify(path / graph.file, graph.sha256)
    return Bundle(path, manifest, hashlib.sha256(raw).hexdigest()[:12])


def discover(folder: Path) -> list[Path]:
    """Returns the bundle folders in a models folder, by name: each folder that is not hidden.

    Raises:
        BundleError: The folder does not exist or holds no bundle.
    """
    if not folder.is_dir():
        raise BundleError(f"the models folder `{folder}` does not exist; give another with --models.")
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise BundleError(f"the models folder `{folder}` holds no bundle; make one with `bert-export SOURCE --output {folder}`.")
    for entry in found:
        if not re.fullmatch(NAME_PATTERN, entry.name):
            raise BundleError(f"`{entry}` cannot be a model: names must match {NAME_PATTERN}; rename or move the folder.")
    return found


def read_figures(raw: bytes) -> tuple[Figure, ...]:
    """Reads a JSON list of figures.

    Raises:
        ValueError: It is not one.
    """
    return tuple(TypeAdapter(list[Figure]).validate_json(raw))


def digest(path: Path) -> str:
    """Returns the sha256 of a file as lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, expected: str) -> None:
    try:
        actual = digest(path)
    except OSError as error:
        raise BundleError(f"bundle file `{path}` cannot be read ({error.strerror}); copy or export the bundle again.") from error
    if actual != expected:
        raise BundleError(
            f"bundle file `{path}` was altered: its sha256 is {actual[:12]}…, the manifest says {expected[:12]}…; "
            "copy or export the bundle again."
        )
