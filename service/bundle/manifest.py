"""The manifest: everything that the service must know about a model."""

from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.record import Record
from bertserve.service.providers import Provider

Side = Literal["left", "right"]
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME_RULE = "1 to 64 characters: letters a-z and A-Z, digits, `.`, `_` and `-`; the first is a letter or a digit"  # used in messages

Task = str  # a Hugging Face name; service/tasks/catalog.py lists the supported ones and the requirements of each
Activation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["none", "cls", "mean", "max"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
VECTOR_OUTPUT = "sentence_embedding"  # output of graphs that make the vector of a text themselves, for the pooling `graph`
# The layers in a graph's output: a name, or a list of numbers; 0 is the output of the embeddings.
Layers = Literal["last", "last_four"] | Annotated[tuple[int, ...], Field(strict=False)]
LAST_FOUR = 4
Combine = Literal["concat", "sum", "mean"]
WeightsFormat = Literal["safetensors", "pickle"]
TokenTypes = Literal["template", "zero"]
Int8Split = Literal["calibration", "gate", "validation"]


class SpecialPart(Record):
    """A special token at a fixed position of the template."""

    special: str
    id: Annotated[int, Field(ge=0)]
    type_id: Annotated[int, Field(ge=0)]


class TextPart(Record):
    """The position of the first (`a`) or second text (`b`) in the template."""

    text: Literal["a", "b"]
    type_id: Annotated[int, Field(ge=0)]


TemplatePart = SpecialPart | TextPart


class MaskToken(Record):
    """The mask token, with its spelling in a text."""

    token: str
    id: Annotated[int, Field(ge=0)]


class AddedToken(Record):
    """A token that training added to the vocabulary, such as an entity marker. It is recognized in a text."""

    token: str
    id: Annotated[int, Field(ge=0)]
    special: bool


class TokenizerSpec(Record):
    """The rules for tokenizing that are not in `tokenizer.json`."""

    sha256: str
    max_length: Annotated[int, Field(ge=3)]
    pad_id: Annotated[int, Field(ge=0)]
    padding_side: Side
    single: Annotated[tuple[TemplatePart, ...], Field(strict=False)]
    pair: Annotated[tuple[TemplatePart, ...], Field(strict=False)] | None
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None
    pairs_only: bool = False
    added_tokens: Annotated[tuple[AddedToken, ...], Field(strict=False)] = ()
    truncation_side: Side = "right"

    @property
    def parts(self) -> tuple[TemplatePart, ...]:
        """The parts of both templates."""
        return (*self.single, *(self.pair or ()))


class Flops(Record):
    """The operations of a run: a text of S tokens takes `linear * S + quadratic * S**2` floating point operations."""

    linear: Annotated[float, Field(gt=0)]
    quadratic: Annotated[float, Field(ge=0)]


class Embedding(Record):
    """The default settings of a text's vector, and the choices of a request."""

    pooling: Pooling | Literal["graph"]
    normalize: bool
    dimensions: Annotated[int, Field(gt=0)]
    vector_dimensions: Annotated[int, Field(gt=0)] | None = None
    truncate_dim: Annotated[int, Field(gt=0)] | None = None
    similarity: Similarity = "cosine"
    layers: Layers = "last"
    default_layers: Annotated[tuple[int, ...], Field(strict=False, min_length=1)] | None = None
    combine: Combine = "concat"
    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def layers_output(self) -> str:
        """Name of the graphs' output with all layers, or with the last layer if there are no others."""
        names = {"last": "last_hidden_state", "last_four": "last_four_hidden_states"}
        return names[self.layers] if isinstance(self.layers, str) else "_".join(("hidden_states", *map(str, self.layers)))

    @property
    def positions(self) -> dict[int, int]:
        """Position of each layer in that output, by its negative number from the end and, if known, by its number."""
        if isinstance(self.layers, str):
            return {-1: 0} if self.layers == "last" else {position - LAST_FOUR: position for position in range(LAST_FOUR)}
        ends = [(layer, layer - self.layers[-1] - 1) for layer in self.layers]
        return {layer: position for position, names in enumerate(ends) for layer in names}

    @property
    def layer_count(self) -> int:
        """Number of layers in that output."""
        return len(set(self.positions.values()))


class Example(Record):
    """A request body with its result at export, from the default graph of the CPU or else of the first provider, for `bert-serve check`."""

    request: dict[str, Any]
    result: Any


class Metric(Record):
    """A task metric on labeled data, for the checkpoint in PyTorch and for graphs by `provider/precision`."""

    name: str
    checkpoint: Annotated[float, Field(allow_inf_nan=False)]
    graphs: dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class Source(Record):
    """The origin of the bundle."""

    checkpoint: str
    revision: str | None
    weights_sha256: str
    versions: dict[str, str]
    commit: str | None = None
    license: Annotated[tuple[str, ...], Field(strict=False)] = ()
    license_name: str | None = None
    license_link: str | None = None
    language: Annotated[tuple[str, ...], Field(strict=False)] = ()
    datasets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    ignored_weights: Annotated[tuple[str, ...], Field(strict=False)] = ()
    weights_format: WeightsFormat | None = None
    token_types: TokenTypes | None = None


class OmittedGraph(Record):
    """A graph that was tried and omitted."""

    provider: Provider
    precision: Precision
    reason: str


class TextDigests(Record):
    """The texts or pairs of texts of a split, as short digests."""

    texts: int
    hashes: str


class ModelConfig(Protocol):
    """The properties of a model that tasks use, from a manifest or from the exporter's checkpoint, which has no manifest yet."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names by id."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag of each label, for token classification; empty if the labels are the tags."""

    @property
    def activation(self) -> Activation:
        """The function from logits to scores."""

    @property
    def embedding(self) -> Embedding | None:
        """The settings of embeddings, if the model embeds texts."""

    @property
    def attention_heads(self) -> tuple[int, ...]:
        """Number of heads of each layer, if attention is an output of the graph; otherwise empty."""


class Manifest(Record):
    """Everything that the service must know about a model, in version 1."""

    format: Literal["bertserve-bundle"]
    format_version: Literal[1]
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    task: Task
    labels: Annotated[tuple[str, ...], Field(strict=False)]
    # the tag of each label in BIO, BIOES or BILOU, for token classification; empty if all labels are such tags
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    activation: Activation
    embedding: Embedding | None = None
    tokenizer: TokenizerSpec
    flops: Flops
    graphs: Annotated[tuple[GraphSpec, ...], Field(strict=False, min_length=1)]
    example: Example
    metrics: Annotated[tuple[Metric, ...], Field(strict=False)]
    source: Source
    omitted: Annotated[tuple[OmittedGraph, ...], Field(strict=False)] = ()
    # the texts that made and validated int8, so that others can be compared with them; null if there is no int8 graph, or if not recorded
    int8_texts: Annotated[dict[Int8Split, TextDigests], Field(min_length=3)] | None = None
    # number of heads of each layer, if the graphs return attention maps
    attention_heads: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _each_provider_has_a_default(self) -> Self:
        defaults = [graph.provider for graph in self.graphs if graph.default]
        if sorted(defaults) != sorted({graph.provider for graph in self.graphs}):
            raise ValueError("each provider needs exactly one graph with `default: true`")
        return self

    @model_validator(mode="after")
    def _graphs_match_the_model(self) -> Self:
        if self.embedding is not None and (self.embedding.pooling == "graph") != (self.embedding.vector_dimensions is not None):
            raise ValueError("`vector_dimensions` must be set if and only if `pooling` is `graph`")
        for graph in self.graphs:
            if self.attention_heads and not graph.has_attentions:
                raise ValueError(f"`attention_heads` needs an output of the kind `per_map`, which `{graph.file}` does not have")
            if self.tokenizer.padding_side == "left" and any(spec.fill == "lengths" for spec in graph.inputs):
                raise ValueError(f"`{graph.file}` has the input `lengths`, which needs `tokenizer.padding_side` to be `right`")
        return self

    @model_validator(mode="after")
    def _tags_and_calibrations_match_the_labels(self) -> Self:
        if self.tags and len(self.tags) != len(self.labels):
            raise ValueError(f"`tags` has {len(self.tags)} items and `labels` has {len(self.labels)}; each label needs one tag")
        for graph in self.graphs:
            if (calibration := graph.calibration) is not None:
                count = {"per-label": len(self.labels), "answers": 2}.get(calibration.method, 1)
                if not {len(calibration.scale), len(calibration.bias)} <= {1, count}:
                    counts = "1 value" if count == 1 else f"1 or {count} values"
                    raise ValueError(
                        f"`scale` and `bias` of the calibration of `{graph.file}` must have {counts} for the method `{calibration.method}`"
                    )
        return self
