"""The common parts of the bodies of all tasks: the form of `inputs`, `parameters`, and the shape of an answer.

An unknown name is an error, because it would have no effect. `Closed` checks the names in `parameters` and in the objects of `inputs`. The
reader of the body checks the names next to `inputs`, where some names of clients are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.words import Unit

# Tags of the unions below. pydantic puts them into error locations, and messages leave them out.
TEXT, PAIR, LIST = TAGS = ("<text>", "<object>", "<list>")


def _json_kind(*tags: str) -> Callable[[Any], str | None]:
    """Returns what sorts inputs into tags by their JSON kind, None for one that is not among them."""
    kinds = {kind: tag for kind, tag in ((str, TEXT), (dict, PAIR), (list, LIST)) if tag in tags}
    # called for each item of a list, so no more than a look-up; a model is what an object was made into
    return lambda value: kinds.get(dict if isinstance(value, BaseModel) else type(value))


def one_of(message: str, *tags: str) -> Discriminator:
    """Returns what tells a union's members apart by their JSON kind; `message` says what a value must be."""
    return Discriminator(_json_kind(*tags), custom_error_type="input", custom_error_message=f"must be {message}")


def lower(value: Any) -> Any:
    """Returns a text in lower case, anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def body_config(**example: Any) -> ConfigDict:
    """Returns the configuration of a body, with an example of one for OpenAPI, which need not know of keys that mean nothing."""
    return ConfigDict(strict=True, json_schema_extra={"examples": [example], "additionalProperties": False})


# Items of a list of inputs, whatever --max-inputs says: what reads a body holds the event loop, and a body of 8 MiB may have millions.
MAX_ITEMS = 2**14
# without fail_fast a list of wrong items would make an error for each
STOP = Field(fail_fast=True, max_length=MAX_ITEMS)

TextOrTexts = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[str], STOP, Tag(LIST)],
    one_of("a text or a list of texts", TEXT, LIST),
    Field(description="One or more texts."),
]
Truncate = Annotated[bool | None, Field(description="Truncate long texts; otherwise they are an error.")]
TruncationDirection = Annotated[
    Literal["left", "right"] | None,
    BeforeValidator(lower),
    Field(description="End to truncate; by default the model's own."),
]
Stride = Annotated[int | None, Field(ge=0, description="Tokens shared by neighboring windows; by default 128, or half a window if less.")]
OffsetUnit = Annotated[
    Unit,
    BeforeValidator(lower),
    Field(description="Unit of `start` and `end`; `utf16` for JavaScript."),
]


class Closed(BaseModel):
    """Base of the objects within a body: an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # Names of the fields, in a set that is made once, because each item of a list needs it.
    names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Stores the names of the fields."""
        cls.names = frozenset(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_name(cls, given: Any) -> Any:
        """Stops at the first unknown name: `extra="forbid"` by itself makes an error for each, of a million for seconds."""
        if type(given) is dict and not given.keys() <= cls.names:  # JSON has no subclasses of it, and this runs for each item of a list
            unknown = next(name for name in given if name not in cls.names)
            raise PydanticCustomError("unknown_name", "unknown", {"name": unknown, "known": list(cls.model_fields)})
        return given


class TaskParameters(Closed):
    """Base of all `parameters`."""

    model_config = ConfigDict(frozen=True)


@functools.cache
def defaults(kind: type[TaskParameters]) -> TaskParameters:
    """Returns parameters of a kind of which the caller set none; they are frozen, so all requests share them."""
    return kind()


class TaskBody(BaseModel):
    """What all request bodies share; a task's own has `inputs` and `parameters`."""

    model_config = ConfigDict(strict=True)

    # Names of its fields.
    names: ClassVar[frozenset[str]] = frozenset()
    # Whether a key whose value is null asks for nothing, whatever its name.
    null_is_nothing: ClassVar[bool] = False
    # Class of the `parameters`.
    parameters_type: ClassVar[type[TaskParameters]] = TaskParameters
    # Whether one input alone is answered like a list of one, as the official client asks of text classification.
    always_list: ClassVar[bool] = False
    # What the limit of inputs counts, and what holds the input that an error is about.
    counted: ClassVar[str] = "`inputs` has {} items"
    subject: ClassVar[str] = "inputs"

    model: Annotated[str | None, Field(description="Name of the model, if several can do the task.")] = None
    # pydantic is not told: one body has a query and texts in its place
    if TYPE_CHECKING:
        inputs: Any
    parameters: Any = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Stores the names of the fields."""
        cls.names = frozenset(cls.model_fields)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """Returns a body, as OpenAPI shows it."""
        extra = cls.model_config.get("json_schema_extra")
        assert isinstance(extra, dict), "each body has an example"
        (body,) = cast("list[dict[str, Any]]", extra["examples"])
        return body

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

    @property
    def texts_read(self) -> int:
        """How many texts or pairs the model reads for it, windows aside; what load tests count."""
        return self.count

    def texts_of(self, item: Any) -> Iterable[str]:
        """Returns the texts of one input, as they count for the limit of characters."""
        return [item] if isinstance(item, str) else [value for _, value in item if isinstance(value, str)]

    def requests(self, config: ModelConfig | None = None) -> list[Any]:
        """Returns one task request per input.

        Args:
            config: What the model says where the body does not; of embeddings alone it is needed.
        """
        parameters = defaults(self.parameters_type) if self.parameters is None else self.parameters
        return [self.request(item, parameters) for item in self.items]

    def request(self, item: Any, parameters: Any) -> Any:
        """Returns the task request of one input."""
        raise NotImplementedError

    def answer(self, results: list[Any]) -> Any:
        """Returns the value of the response's body, given one result per input: a list for a list, unless `always_list`."""
        return results if self.always_list or self.is_list else results[0]


class ForeignBody(TaskBody):
    """Base of the bodies of other services' formats, which have no `parameters`. Some clients send null for what was not set."""

    null_is_nothing: ClassVar[bool] = True

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Stores the names of the fields."""
        cls.names = frozenset(cls.model_fields) - {"parameters"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may measure.

    Attributes:
        max_inputs: Inputs in one request.
        max_chars: Characters of one text.
    """

    max_inputs: int
    max_chars: int
