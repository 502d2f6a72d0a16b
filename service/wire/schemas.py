"""The wire: what all bodies share, and the pydantic models of four tasks' requests and responses; `heads` has the other tasks'.

Unknown keys beside `inputs` are ignored, because clients send `options` and more; an unknown name in `parameters` is an
error, because it would silently do nothing. `service/wire/reading.py` reads bodies with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from service.tasks import answer, classify, fill_mask, ner
from service.tasks.encoded import ModelConfig

# Tags of the unions below; pydantic puts them into error locations, where nobody wants to read them.
TEXT, PAIR, LIST = TAGS = ("<text>", "<object>", "<list>")


def _kind(*tags: str) -> Callable[[Any], str | None]:
    """Returns what sorts inputs into tags by their JSON kind, None for one that is not among them."""
    kinds = {str: TEXT, dict: PAIR, list: LIST}
    return lambda value: next(
        (tag for kind, tag in kinds.items() if tag in tags and isinstance(value, kind | BaseModel if tag == PAIR else kind)), None
    )


def kinds(message: str, *tags: str) -> Discriminator:
    """Returns what tells a union's members apart by their JSON kind; `message` says what a value must be."""
    return Discriminator(_kind(*tags), custom_error_type="input", custom_error_message=f"must be {message}")


def lower(value: Any) -> Any:
    """Returns a text in lower case, anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def listed(value: Any) -> Any:
    """Returns a list of one for a text, anything else as it is."""
    return [value] if isinstance(value, str) else value


def config(**example: Any) -> ConfigDict:
    """Returns the configuration of a body, with an example of one for OpenAPI."""
    return ConfigDict(strict=True, json_schema_extra={"examples": [example]})


# without fail_fast a body of a million wrong items would make a million errors
STOP = Field(fail_fast=True)


class Parameters(BaseModel):
    """Base of all `parameters`: an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


Unit = Annotated[
    Literal["code_points", "utf16", "utf8"],
    BeforeValidator(lower),
    Field(description="What `start` and `end` count: Python's code points, JavaScript's UTF-16 units, or bytes of UTF-8."),
]


class ClassifyParameters(Parameters):
    """Parameters of text classification."""

    top_k: Annotated[int | None, Field(ge=1, description="How many labels to return; all when absent.")] = None
    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None,
        BeforeValidator(lower),
        Field(description="What turns logits into scores, in place of the model's own."),
    ] = None
    truncation: Annotated[bool, Field(description="Cut a text over the model's length, with a warning; false makes it an error.")] = True
    window: Annotated[
        Literal["mean", "max"] | None,
        Field(description="Score every window of a long text and combine the scores, instead of cutting."),
    ] = None
    stride: Annotated[int | None, Field(ge=0, description="Tokens that neighboring windows share; 128, at most half a window.")] = None


class NerParameters(Parameters):
    """Parameters of token classification."""

    aggregation_strategy: Annotated[
        Literal["none", "simple", "first", "average", "max"],
        BeforeValidator(lower),
        Field(description="How tokens become entities; `none` returns the tokens."),
    ] = "simple"
    ignore_labels: Annotated[list[str], Field(description="Labels and entity groups that are left out.")] = ["O"]
    stride: Annotated[int | None, Field(ge=0, description="Tokens that neighboring windows share; 128, at most half a window.")] = None
    offset_unit: Unit = "code_points"


class AnswerParameters(Parameters):
    """Parameters of question answering."""

    top_k: Annotated[int, Field(ge=1, le=1000, description="How many answers to return; a list if over 1.")] = 1
    doc_stride: Annotated[
        int | None, Field(ge=0, description="Tokens that neighboring windows share; half of max_seq_len, at most 128.")
    ] = None
    max_answer_len: Annotated[int, Field(ge=1, description="Most tokens of an answer.")] = 15
    max_question_len: Annotated[int | None, Field(ge=1, description="Without effect, as in transformers.")] = None
    max_seq_len: Annotated[int | None, Field(ge=1, description="Tokens of a window, question included; 384, at most the model's.")] = None
    handle_impossible_answer: Annotated[bool, Field(description='Whether "no answer" may be the answer.')] = False
    align_to_words: Annotated[bool, Field(description="Whether answers are widened to whole words.")] = True
    duplicates: Annotated[
        Literal["best", "sum"],
        BeforeValidator(lower),
        Field(description="Equal answers keep their best score, or add up as in transformers 5.2.0."),
    ] = "best"
    offset_unit: Unit = "code_points"


class FillMaskParameters(Parameters):
    """Parameters of fill-mask."""

    top_k: Annotated[int, Field(ge=1, description="How many tokens to return for each mask.")] = 5
    targets: Annotated[
        Annotated[list[str], Field(min_length=1, max_length=1000)] | None,
        BeforeValidator(listed),
        Field(description="The only words to consider."),
    ] = None


class TextPair(BaseModel):
    """A text and a second text that belongs to it."""

    model_config = ConfigDict(strict=True)

    text: str
    text_pair: str | None = None


class Question(BaseModel):
    """A question and the passage that has the answer."""

    model_config = ConfigDict(strict=True)

    question: str
    context: str


class Body(BaseModel):
    """What all request bodies share; a subclass has `inputs` and `parameters`."""

    model_config = ConfigDict(strict=True)
    # Whether one input alone is answered like a list of one, as the official client asks of text classification.
    always_list: ClassVar[bool] = False

    model: Annotated[str | None, Field(description="Name of the model, where several are loaded for the task.")] = None
    # pydantic is not told: one body has a query and texts in its place
    if TYPE_CHECKING:
        inputs: Any
    parameters: Any = None

    # Class of the `parameters`.
    parameters_type: ClassVar[type[Parameters]] = Parameters
    # Whether answers can be so large that writing them is worth taking turns.
    large: ClassVar[bool] = False
    # What the limit of inputs counts, and what holds the input that an error is about.
    counted: ClassVar[str] = "`inputs` has {} items"
    subject: ClassVar[str] = "inputs"

    @property
    def items(self) -> Sequence[Any]:
        """The inputs as a list."""
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    @property
    def is_list(self) -> bool:
        """Whether the caller sent a list."""
        return isinstance(self.inputs, list)

    @property
    def count(self) -> int:
        """How many texts, pairs or questions the body has."""
        return len(self.items)

    def parts(self, item: Any) -> Iterable[str]:
        """Returns the texts of one input, as they count for the limit of characters."""
        return [item] if isinstance(item, str) else [value for _, value in item if isinstance(value, str)]

    def requests(self, head: ModelConfig | None = None) -> list[Any]:
        """Returns one task request per input.

        Args:
            head: What the model says where the body does not; of embeddings alone it is needed.
        """
        options = {} if self.parameters is None else self.parameters.model_dump(exclude_unset=True)
        return [self.request(item, options) for item in self.items]

    def request(self, item: Any, options: dict[str, Any]) -> Any:
        """Returns the task request of one input."""
        raise NotImplementedError

    def shape(self, results: list[Any], agent: str = "") -> Any:
        """Returns the response body: a list in is a list out.

        Args:
            results: One per input.
            agent: The client's `User-Agent`, for the one task whose shape goes by it.
        """
        return results if self.is_list or self.always_list else results[0]


_Text = Annotated[str, Tag(TEXT)]
_Pair = Annotated[TextPair, Tag(PAIR)]
_Question = Annotated[Question, Tag(PAIR)]
_TextOrPair = Annotated[_Text | _Pair, kinds("a text or {text, text_pair}", TEXT, PAIR)]


class ClassifyBody(Body):
    """Body of a text classification request."""

    model_config = config(inputs="A warm, funny and thoroughly engaging film.", parameters={"top_k": 1})
    always_list: ClassVar[bool] = True
    parameters_type: ClassVar[type[Parameters]] = ClassifyParameters

    inputs: Annotated[
        _Text | _Pair | Annotated[list[_TextOrPair], STOP, Tag(LIST)],
        kinds("a text, {text, text_pair}, or a list of these", TEXT, PAIR, LIST),
        Field(description="A text, a pair, or a list of these."),
    ]
    parameters: ClassifyParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> classify.Request:
        """Returns the request of a text or a pair."""
        return classify.Request(item, **options) if isinstance(item, str) else classify.Request(item.text, item.text_pair, **options)


class NerBody(Body):
    """Body of a token classification request."""

    model_config = config(inputs="Ada Lovelace wrote to Charles Babbage from London.")
    parameters_type: ClassVar[type[Parameters]] = NerParameters

    inputs: Annotated[
        _Text | Annotated[list[str], STOP, Tag(LIST)],
        kinds("a text or a list of texts", TEXT, LIST),
        Field(description="A text, or a list of texts."),
    ]
    parameters: NerParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> ner.Request:
        """Returns the request of a text."""
        ignored = {"ignore_labels": tuple(options["ignore_labels"])} if "ignore_labels" in options else {}
        return ner.Request(item, **(options | ignored))


class AnswerBody(Body):
    """Body of a question answering request."""

    model_config = config(inputs={"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886."})
    parameters_type: ClassVar[type[Parameters]] = AnswerParameters

    inputs: Annotated[
        _Question | Annotated[list[Question], STOP, Tag(LIST)],
        kinds("{question, context} or a list of these", PAIR, LIST),
        Field(description="A question with its passage, or a list of these."),
    ]
    parameters: AnswerParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> answer.Request:
        """Returns the request of a question."""
        return answer.Request(item.question, item.context, **options)


class FillMaskBody(Body):
    """Body of a fill-mask request."""

    model_config = config(inputs="The king of [MASK] died in 1066.", parameters={"top_k": 3})
    parameters_type: ClassVar[type[Parameters]] = FillMaskParameters

    inputs: Annotated[
        _Text | Annotated[list[str], STOP, Tag(LIST)],
        kinds("a text or a list of texts", TEXT, LIST),
        Field(description="A text with one or more masks, or a list of such texts."),
    ]
    parameters: FillMaskParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> fill_mask.Request:
        """Returns the request of a text."""
        targets = {"targets": tuple(options["targets"])} if options.get("targets") is not None else {}
        return fill_mask.Request(item, **(options | targets))


class LabelScore(BaseModel):
    """One label with its score."""

    label: str
    score: float


class Entity(BaseModel):
    """One entity; offsets are code points unless asked otherwise, end exclusive. With the strategy `none`, a token with `entity` and `index`."""

    entity_group: str | None = None
    entity: str | None = None
    index: int | None = None
    score: float
    word: str
    start: int
    end: int


class Answer(BaseModel):
    """One answer; offsets are code points of the passage unless asked otherwise, end exclusive."""

    answer: str
    score: float
    start: int
    end: int


class Filled(BaseModel):
    """One token in a mask's place."""

    score: float
    token: int
    token_str: str
    sequence: str


class ErrorBody(BaseModel):
    """Every error: one sentence of what was wrong and what to change, and its kind."""

    error: str
    error_type: str
    request_id: str
