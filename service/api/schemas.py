"""The wire: pydantic models of request and response bodies, one of each a task. OpenAPI is generated from them.

Unknown keys beside `inputs` are ignored, because clients send `options` and more; an unknown name in `parameters` is an
error, because it would silently do nothing. `service/api/reading.py` reads bodies with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from service.tasks import answer, classify, fill_mask, ner

# Tags of the unions below; pydantic puts them into error locations, where nobody wants to read them.
TEXT, PAIR, LIST = TAGS = ("<text>", "<object>", "<list>")


def _kind(*tags: str) -> Callable[[Any], str | None]:
    """Returns what sorts inputs into tags by their JSON kind, None for one that is not among them."""
    kinds = {str: TEXT, dict: PAIR, list: LIST}
    return lambda value: next(
        (tag for kind, tag in kinds.items() if tag in tags and isinstance(value, kind | BaseModel if tag == PAIR else kind)), None
    )


def _kinds(message: str, *tags: str) -> Discriminator:
    return Discriminator(_kind(*tags), custom_error_type="input", custom_error_message=f"must be {message}")


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _config(**example: Any) -> ConfigDict:
    return ConfigDict(strict=True, json_schema_extra={"examples": [example]})


# without fail_fast a body of a million wrong items would make a million errors
_STOP = Field(fail_fast=True)


class Parameters(BaseModel):
    """Base of all `parameters`: an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ClassifyParameters(Parameters):
    """Parameters of text classification."""

    top_k: Annotated[int | None, Field(ge=1, description="How many labels to return; all when absent.")] = None
    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None,
        BeforeValidator(_lower),
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
        BeforeValidator(_lower),
        Field(description="How tokens become entities; `none` returns the tokens."),
    ] = "simple"
    ignore_labels: Annotated[list[str], Field(description="Labels and entity groups that are left out.")] = ["O"]
    stride: Annotated[int | None, Field(ge=0, description="Tokens that neighboring windows share; 128, at most half a window.")] = None


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
        BeforeValidator(_lower),
        Field(description="Equal answers keep their best score, or add up as in transformers 5.2.0."),
    ] = "best"


class FillMaskParameters(Parameters):
    """Parameters of fill-mask."""

    top_k: Annotated[int, Field(ge=1, description="How many tokens to return for each mask.")] = 5
    targets: Annotated[
        Annotated[list[str], Field(min_length=1, max_length=1000)] | None,
        BeforeValidator(_listed),
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
    inputs: Any
    parameters: Any = None

    # Class of the `parameters`.
    parameters_type: ClassVar[type[Parameters]] = Parameters

    @property
    def items(self) -> Sequence[Any]:
        """The inputs as a list."""
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    @property
    def is_list(self) -> bool:
        """Whether the caller sent a list."""
        return isinstance(self.inputs, list)

    def requests(self) -> list[Any]:
        """Returns one task request per input."""
        options = {} if self.parameters is None else self.parameters.model_dump(exclude_unset=True)
        return [self.request(item, options) for item in self.items]

    def request(self, item: Any, options: dict[str, Any]) -> Any:
        """Returns the task request of one input."""
        raise NotImplementedError

    def shape(self, results: list[Any]) -> Any:
        """Returns the response body: a list in is a list out."""
        return results if self.is_list or self.always_list else results[0]


_Text = Annotated[str, Tag(TEXT)]
_Pair = Annotated[TextPair, Tag(PAIR)]
_Question = Annotated[Question, Tag(PAIR)]
_TextOrPair = Annotated[_Text | _Pair, _kinds("a text or {text, text_pair}", TEXT, PAIR)]


class ClassifyBody(Body):
    """Body of a text classification request."""

    model_config = _config(inputs="A warm, funny and thoroughly engaging film.", parameters={"top_k": 1})
    always_list: ClassVar[bool] = True
    parameters_type: ClassVar[type[Parameters]] = ClassifyParameters

    inputs: Annotated[
        _Text | _Pair | Annotated[list[_TextOrPair], _STOP, Tag(LIST)],
        _kinds("a text, {text, text_pair}, or a list of these", TEXT, PAIR, LIST),
        Field(description="A text, a pair, or a list of these."),
    ]
    parameters: ClassifyParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> classify.Request:
        """Returns the request of a text or a pair."""
        return classify.Request(item, **options) if isinstance(item, str) else classify.Request(item.text, item.text_pair, **options)


class NerBody(Body):
    """Body of a token classification request."""

    model_config = _config(inputs="Ada Lovelace wrote to Charles Babbage from London.")
    parameters_type: ClassVar[type[Parameters]] = NerParameters

    inputs: Annotated[
        _Text | Annotated[list[str], _STOP, Tag(LIST)],
        _kinds("a text or a list of texts", TEXT, LIST),
        Field(description="A text, or a list of texts."),
    ]
    parameters: NerParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> ner.Request:
        """Returns the request of a text."""
        ignored = {"ignore_labels": tuple(options["ignore_labels"])} if "ignore_labels" in options else {}
        return ner.Request(item, **(options | ignored))


class AnswerBody(Body):
    """Body of a question answering request."""

    model_config = _config(inputs={"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886."})
    parameters_type: ClassVar[type[Parameters]] = AnswerParameters

    inputs: Annotated[
        _Question | Annotated[list[Question], _STOP, Tag(LIST)],
        _kinds("{question, context} or a list of these", PAIR, LIST),
        Field(description="A question with its passage, or a list of these."),
    ]
    parameters: AnswerParameters | None = None

    def request(self, item: Any, options: dict[str, Any]) -> answer.Request:
        """Returns the request of a question."""
        return answer.Request(item.question, item.context, **options)


class FillMaskBody(Body):
    """Body of a fill-mask request."""

    model_config = _config(inputs="The king of [MASK] died in 1066.", parameters={"top_k": 3})
    parameters_type: ClassVar[type[Parameters]] = FillMaskParameters

    inputs: Annotated[
        _Text | Annotated[list[str], _STOP, Tag(LIST)],
        _kinds("a text or a list of texts", TEXT, LIST),
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
    """One entity; offsets are code points, end exclusive. With the strategy `none`, a token with `entity` and `index`."""

    entity_group: str | None = None
    entity: str | None = None
    index: int | None = None
    score: float
    word: str
    start: int
    end: int


class Answer(BaseModel):
    """One answer; offsets are code points of the passage, end exclusive."""

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


BODIES: dict[str, type[Body]] = {classify.TASK: ClassifyBody, ner.TASK: NerBody, answer.TASK: AnswerBody, fill_mask.TASK: FillMaskBody}
RESPONSES: dict[str, Any] = {
    classify.TASK: list[list[LabelScore]],
    ner.TASK: list[Entity] | list[list[Entity]],
    answer.TASK: Answer | list[Answer] | list[list[Answer]],
    fill_mask.TASK: list[Filled] | list[list[Filled]] | list[list[list[Filled]]],
}
