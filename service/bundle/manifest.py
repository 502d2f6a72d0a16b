"""The manifest: everything the service has to know about a model. The field-by-field specification is docs/reference/manifest.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from bertserve.service.bundle.graph_spec import GraphSpec, Precision, Record
from bertserve.service.providers import Provider

Side = Literal["left", "right"]
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

Task = str  # a Hugging Face name; service/tasks/catalog.py says which are served, and what a manifest of each must have
Activation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["none", "cls", "mean", "max"]
# Which layers a graph gives out: by name, or as a list of their numbers, 0 for what the embeddings give.
Layers = Literal["last", "last_four"] | Annotated[tuple[int, ...], Field(strict=False)]
LAST_FOUR = 4
Combine = Literal["concat", "sum", "mean"]


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


class AddedToken(Record):
    """A token that training added to the vocabulary, such as an entity marker. A text that spells it has it.

    Attributes:
        token: How a text spells it.
        id: Its id.
        special: Whether a decoded text leaves it out.
    """

    token: str
    id: Annotated[int, Field(ge=0)]
    special: bool


class TokenizerSpec(Record):
    """How texts become token ids, in addition to `tokenizer.json` itself.

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
        pairs_only: Whether the model says how two texts go together, so that one alone means nothing to it.
        added_tokens: Tokens that texts may spell besides those of the vocabulary's own. Not among them are the tokens of the templates,
            of padding, of unknown text and of the mask: spelled in a text these are plain text.
        truncation_side: At which end a text over the length is cut, unless the request says otherwise.
    """

    sha256: str
    max_length: Annotated[int, Field(ge=3)]
    pad_id: Annotated[int, Field(ge=0)]
    padding_side: Side
    single: Annotated[tuple[Piece, ...], Field(strict=False)]
    pair: Annotated[tuple[Piece, ...], Field(strict=False)]
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None
    pairs_only: bool = False
    added_tokens: Annotated[tuple[AddedToken, ...], Field(strict=False)] = ()
    truncation_side: Side = "right"


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
        layers: `last_four` where the graphs also give out the last four layers side by side, or the numbers of the layers that they do,
            ascending and with the last one at the end.
        default_layers: Layers of a request that names none; null for the last.
        combine: How several layers become one where a request does not say.
        prompts: Name -> what is put before a text of that kind.
        default_prompt: Name of the prompt of a request that names none, or null.
    """

    pooling: Pooling
    normalize: bool
    dimensions: Annotated[int, Field(gt=0)]
    layers: Layers = "last"
    default_layers: Annotated[tuple[int, ...], Field(strict=False, min_length=1)] | None = None
    combine: Combine = "concat"
    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def layers_output(self) -> str:
        """Name of the graphs' output that has the layers side by side, or the last one where there are no others."""
        names = {"last": "last_hidden_state", "last_four": "last_four_hidden_states"}
        return names[self.layers] if isinstance(self.layers, str) else "_".join(("hidden_states", *map(str, self.layers)))

    @property
    def places(self) -> dict[int, int]:
        """Where in that output each layer stands, by its number where that is known, and by the negative one from the end."""
        if isinstance(self.layers, str):
            return {-1: 0} if self.layers == "last" else {place - LAST_FOUR: place for place in range(LAST_FOUR)}
        ends = [(layer, layer - self.layers[-1] - 1) for layer in self.layers]
        return {layer: place for place, both in enumerate(ends) for layer in both}

    @property
    def layer_count(self) -> int:
        """How many layers stand in that output."""
        return len(set(self.places.values()))

    @model_validator(mode="after")
    def _has_its_own_layers(self) -> Embedding:
        if not isinstance(self.layers, str) and (
            not self.layers or list(self.layers) != sorted({layer for layer in self.layers if layer >= 0})
        ):
            raise ValueError(f"`layers` must be ascending numbers of at least 0 without duplicates, not {list(self.layers)}")
        if other := [layer for layer in self.default_layers or () if layer not in self.places]:
            raise ValueError(f"`default_layers` has {other[0]}, which is not in `layers`")
        return self


class Example(Record):
    """A stored request body and the result that the default CPU graph gave at export, for `bert-serve check`."""

    request: dict[str, Any]
    result: Any


class Metric(Record):
    """A task metric measured on labeled data, of the checkpoint in PyTorch and of graphs by `provider/precision`."""

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
        license: The hub's ids of the checkpoint's licenses, as its card says; none where it does not. So are the next fields.
        license_name: Name of a license that has no id, which is then `other`.
        license_link: Where that license is.
        language: Codes of the languages.
        datasets: The hub's ids of what it was trained on.
        ignored_weights: Patterns of the names of weights that the exported model leaves unused, because the user said that they do not matter.
    """

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


class OmittedGraph(Record):
    """A graph that was tried and is not there.

    Attributes:
        provider: What it was for.
        precision: What it was to compute in.
        reason: Why it is not there, and what to try.
    """

    provider: Provider
    precision: Precision
    reason: str


class TextSplit(Record):
    """The texts, or pairs of texts, of one split, as short digests.

    Attributes:
        texts: How many there are; passages that the exporter joins of them do not count.
        hashes: Base64 of the first four bytes of each one's SHA-256, in order.
    """

    texts: int
    hashes: str


class TextSplits(Record):
    """The texts that int8 was made with and judged on, so that other texts can be compared with them.

    Attributes:
        calibration: Texts that scales, rounding and bias were chosen on, or null where that was not recorded.
        gate: Texts that decided which matrices stay in float, or null where that was not recorded.
        report: Texts that the validation report of int8 was measured on.
    """

    calibration: TextSplit | None
    gate: TextSplit | None
    report: TextSplit


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
    figures: Annotated[tuple[Metric, ...], Field(strict=False)]
    source: Source
    omitted: Annotated[tuple[OmittedGraph, ...], Field(strict=False)] = ()
    int8_texts: TextSplits | None = None  # null where there is no int8 graph, and where that was not recorded
    # of each layer, where the graphs give attention maps out
    attention_heads: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False)] = ()

    @property
    def mask(self) -> MaskToken | None:
        """The mask token, for fill-mask."""
        return self.tokenizer.mask

    @model_validator(mode="after")
    def _graphs_fit_the_tokenizer(self) -> Manifest:
        for graph in self.graphs:
            if self.tokenizer.padding_side == "left" and any(spec.fill == "lengths" for spec in graph.inputs):
                raise ValueError(f"`{graph.file}` has the input `lengths`, which needs `tokenizer.padding_side` to be `right`")
            if graph.shapes is not None and graph.shapes.buckets[-1].length != self.tokenizer.max_length:
                raise ValueError(
                    f"the longest of the `shapes` of `{graph.file}` is {graph.shapes.buckets[-1].length}, and `tokenizer.max_length` is "
                    f"{self.tokenizer.max_length}"
                )
        return self

    @model_validator(mode="after")
    def _graphs_give_attentions(self) -> Manifest:
        without = next((graph.file for graph in self.graphs if not graph.gives_attentions), None)
        if self.attention_heads and without is not None:
            raise ValueError(f"`attention_heads` needs an output of the kind `per_map`, which `{without}` does not have")
        return self

    @model_validator(mode="after")
    def _one_default_graph_per_provider(self) -> Manifest:
        defaults = [graph.provider for graph in self.graphs if graph.default]
        if sorted(defaults) != sorted({graph.provider for graph in self.graphs}):
            raise ValueError("each provider needs exactly one graph with `default: true`")
        return self


def read_metrics(raw: bytes) -> tuple[Metric, ...]:
    """Reads a JSON list of metrics.

    Raises:
        ValueError: It is not one.
    """
    return tuple(TypeAdapter(list[Metric]).validate_json(raw))
