"""The wire of tasks beside the four: embeddings, similarity, reranking, zero-shot classification. As in `schemas`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from service.errors import InvalidValueError
from service.tasks import embed, rerank, similarity, zero_shot
from service.tasks.encoded import ModelConfig
from service.wire.schemas import LIST, STOP, TEXT, Body, LabelScore, Parameters, config, kinds, lower

# The first huggingface_hub that takes zero-shot results as a list of objects; those before it take one object of lists.
LISTS_SINCE = (1, 2)
MAX_HYPOTHESIS = 1000  # characters of a label, and of a template: each is read once for every other
_HUB = re.compile(r"hf_hub/(\d+)\.(\d+)")

Direction = Annotated[
    Literal["left", "right"] | None, BeforeValidator(lower), Field(description="At which end a text over the model's length is cut.")
]
Truncate = Annotated[bool | None, Field(description="Cut a text over the model's length, with a warning; false makes it an error.")]
PromptName = Annotated[str | None, Field(description="Which of the model's prompts is put before each text.")]
Pool = Annotated[
    Literal["none", "cls", "mean", "max"] | None,
    BeforeValidator(lower),
    Field(description="How the tokens' vectors become one, in place of the model's own way; `none` keeps them all."),
]


class EmbedOptions(BaseModel):
    """How a text is embedded; each may stand beside `inputs`, as the official client sends them, or within `parameters`."""

    normalize: Annotated[bool | None, Field(description="Bring vectors to length 1; by default as the model says.")] = None
    prompt_name: PromptName = None
    truncate: Truncate = None
    truncation_direction: Direction = None
    dimensions: Annotated[int | None, Field(ge=1, description="Keep that many of the first values; normalizing comes after.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        BeforeValidator(lower),
        Field(description="A vector is a list of numbers, or one text: the base64 of its values as float32, little-endian."),
    ] = None
    pooling: Pool = None
    layers: Annotated[
        Literal["last", "last_four"] | None,
        BeforeValidator(lower),
        Field(description="The last layer, or the last four side by side where the bundle was exported with them."),
    ] = None


class EmbedParameters(EmbedOptions, Parameters):
    """Parameters of an embedding request."""


class EmbedBody(EmbedOptions, Body):
    """Body of an embedding request."""

    model_config = config(inputs=["A warm, funny film.", "The bridge was built in 1886."], normalize=True)
    always_list: ClassVar[bool] = True
    large: ClassVar[bool] = True
    parameters_type: ClassVar[type[Parameters]] = EmbedParameters

    inputs: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[str], STOP, Tag(LIST)],
        kinds("a text or a list of texts", TEXT, LIST),
        Field(description="A text, or a list of texts."),
    ]
    parameters: EmbedParameters | None = None

    def requests(self, head: ModelConfig | None = None) -> list[Any]:
        """Returns one request per text, with what the caller left open as the bundle says."""
        assert head is not None and head.embedding is not None, "a manifest for embeddings has it"
        beside = self.model_dump(include=set(EmbedOptions.model_fields), exclude_none=True)
        within = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        for name in beside.keys() & within.keys():
            if beside[name] != within[name]:
                raise InvalidValueError(f"`{name}` stands both beside `inputs` and in `parameters`, and differs; leave one of them out.")
        options = embed.settled(beside | within, head.embedding)
        return [embed.Request(text, **options) for text in self.items]

    def shape(self, results: list[Any], agent: str = "") -> Any:
        """Returns the vectors.

        Raises:
            InvalidValueError: huggingface_hub asks for base64, which it sends but makes numbers of by `float` (2.4 does).
        """
        asked = self.encoding_format or (self.parameters and self.parameters.encoding_format)
        if asked == "base64" and _HUB.search(agent):
            raise InvalidValueError(
                "`encoding_format` is `base64`, which huggingface_hub cannot read; leave it out, or ask with another client."
            )
        return super().shape(results, agent)


class SimilarityParameters(Parameters):
    """Parameters of sentence similarity."""

    prompt_name: PromptName = None
    truncate: Truncate = None
    truncation_direction: Direction = None
    pooling: Annotated[
        Literal["cls", "mean", "max"] | None,
        BeforeValidator(lower),
        Field(description="How the tokens' vectors become one, in place of the model's own way."),
    ] = None


class Sentences(BaseModel):
    """A sentence and those that it is compared with."""

    model_config = config()

    source_sentence: str
    sentences: Annotated[list[str], STOP]


class SimilarityBody(Body):
    """Body of a sentence similarity request."""

    model_config = config(inputs={"source_sentence": "A warm film.", "sentences": ["A funny film.", "The bridge was built in 1886."]})
    parameters_type: ClassVar[type[Parameters]] = SimilarityParameters
    counted: ClassVar[str] = "`sentences` has {} items"

    inputs: Annotated[Sentences, Field(description="A sentence and the list of those that it is compared with.")]
    parameters: SimilarityParameters | None = None

    @property
    def count(self) -> int:
        """How many sentences are compared."""
        return len(self.inputs.sentences)

    def parts(self, item: Any) -> Iterable[str]:
        """Returns all sentences."""
        return (item.source_sentence, *item.sentences)

    def requests(self, head: ModelConfig | None = None) -> list[Any]:
        """Returns the one request, with what the caller left open as the bundle says."""
        assert head is not None and head.embedding is not None, "a manifest for embeddings has it"
        options = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        like = embed.Request("", **embed.settled(options, head.embedding))
        return [similarity.Request(self.inputs.source_sentence, tuple(self.inputs.sentences), like)]


class RerankBody(Body):
    """Body of a rerank request, as Text Embeddings Inference takes it."""

    model_config = config(query="What is a panda?", texts=["A panda is a bear.", "The bridge was built in 1886."], return_text=True)
    counted: ClassVar[str] = "`texts` has {} items"
    subject: ClassVar[str] = "texts"

    query: Annotated[str, Field(description="What the texts are ranked by.")]
    texts: Annotated[list[str], STOP, Field(description="The texts to be ranked.")]
    raw_scores: Annotated[bool, Field(description="Return the model's logits; else their sigmoids.")] = False
    return_text: Annotated[bool, Field(description="Return each text too.")] = False
    truncate: Truncate = None
    truncation_direction: Direction = None

    @property
    def items(self) -> list[Any]:
        """The query with its texts, the one item."""
        return [self]

    @property
    def is_list(self) -> bool:
        """Never: one query makes one list."""
        return False

    @property
    def count(self) -> int:
        """How many texts are ranked."""
        return len(self.texts)

    def parts(self, item: Any) -> Iterable[str]:
        """Returns the query and the texts."""
        return (self.query, *self.texts)

    def requests(self, head: ModelConfig | None = None) -> list[Any]:
        """Returns the one request."""
        options = self.model_dump(include={"raw_scores", "return_text", "truncate", "truncation_direction"}, exclude_none=True)
        return [rerank.Request(self.query, tuple(self.texts), **options)]


def _split(value: Any) -> Any:
    """Returns the labels of a text with commas between them, as the Hugging Face pipeline reads it."""
    return [label.strip() for label in value.split(",") if label.strip()] if isinstance(value, str) else value


def _check_labels(labels: list[str]) -> list[str]:
    if not labels or not all(label.strip() for label in labels):
        raise PydanticCustomError("labels", "must be one label or more, none of them empty")
    twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None) if len(set(labels)) < len(labels) else None
    if twice is not None:
        raise PydanticCustomError("labels", "must be distinct, and `{label}` stands there twice", {"label": twice[:64]})
    return labels


def _check_template(template: str) -> str:
    if template.count(zero_shot.PLACE) != 1:
        raise PydanticCustomError("template", "must have `{place}` once, where the label goes", {"place": zero_shot.PLACE})
    return template


class ZeroShotParameters(Parameters):
    """Parameters of zero-shot classification."""

    candidate_labels: Annotated[
        list[Annotated[str, Field(max_length=MAX_HYPOTHESIS)]],
        STOP,
        BeforeValidator(_split),
        AfterValidator(_check_labels),
        Field(description="The labels: a list, or a text with commas between them."),
    ]
    hypothesis_template: Annotated[
        str,
        AfterValidator(_check_template),
        Field(max_length=MAX_HYPOTHESIS, description="The sentence that a label makes; `{}` is where the label goes."),
    ] = zero_shot.TEMPLATE
    multi_label: Annotated[bool, Field(description="Score each label by itself; else their scores add up to 1.")] = False


class ZeroShotBody(Body):
    """Body of a zero-shot classification request."""

    model_config = config(inputs="The new phone has a better camera.", parameters={"candidate_labels": ["technology", "politics"]})
    parameters_type: ClassVar[type[Parameters]] = ZeroShotParameters
    counted: ClassVar[str] = "`inputs` and `candidate_labels` make {} pairs"

    inputs: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[str], STOP, Tag(LIST)],
        kinds("a text or a list of texts", TEXT, LIST),
        Field(description="A text, or a list of texts."),
    ]
    # without `parameters` the error is about what is missing in them
    parameters: Annotated[ZeroShotParameters, Field(validate_default=True, default_factory=dict)]

    @property
    def count(self) -> int:
        """How many pairs of a text and a label there are."""
        return len(self.items) * len(self.parameters.candidate_labels)

    def request(self, item: Any, options: dict[str, Any]) -> zero_shot.Request:
        """Returns the request of a text."""
        rest = {name: value for name, value in options.items() if name != "candidate_labels"}
        return zero_shot.Request(item, tuple(options["candidate_labels"]), **rest)

    def shape(self, results: list[Any], agent: str = "") -> Any:
        """Returns a list of `{label, score}` for a text; to huggingface_hub before 1.2, which wants that, an object of lists."""
        hub = _HUB.search(agent)
        if hub is not None and (int(hub[1]), int(hub[2])) < LISTS_SINCE:
            results = [
                {"sequence": text, "labels": [item["label"] for item in found], "scores": [item["score"] for item in found]}
                for text, found in zip(self.items, results, strict=True)
            ]
        return super().shape(results, agent)


class Ranked(BaseModel):
    """One text's place and score."""

    index: int
    score: float
    text: str | None = None


class ZeroShotLists(BaseModel):
    """A zero-shot result as huggingface_hub before 1.2 wants it."""

    sequence: str
    labels: list[str]
    scores: list[float]


Vectors = list[list[float]] | list[list[list[float]]] | list[str] | list[list[str]]
Labels = list[LabelScore] | list[list[LabelScore]] | ZeroShotLists | list[ZeroShotLists]
