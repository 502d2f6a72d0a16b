"""The common parts of all tasks' bodies: types of `inputs`, `parameters`, and the shape of a response.

An unknown name is an error, because it would have no effect. `ClosedModel` checks the names in `parameters` and in the objects of `inputs`,
`reading.py` checks the names next to `inputs`.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetPydanticSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import tagged_union_schema

from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.text.words import Unit

T = TypeVar("T")
AnyCase = Annotated[T, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)]  # a name in any case

# Tags of the members of unions, by the types of JSON values. pydantic puts them into error locations, and messages leave them out.
_TAGS: dict[Any, str] = {str: "<text>", float: "<number>", int: "<number>", dict: "<object>", list: "<list>"}
TAGS = frozenset(_TAGS.values())


def _find_tag(value: Any) -> str | None:  # called for each item of a list, so it is only a look-up; an object can already be a model
    return _TAGS.get(dict if isinstance(value, BaseModel) else type(value))


def one_of(allowed: str) -> GetPydanticSchema:
    """Annotates a union of types for different JSON types: an error is only about the value's type, or says which types are `allowed`."""

    def schema(union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {_find_type_tag(member): handler.generate_schema(member) for member in get_args(union)}
        return tagged_union_schema(choices, _find_tag, custom_error_type="input", custom_error_message=f"must be {allowed}")

    return GetPydanticSchema(schema)


def _find_type_tag(annotation: Any) -> str:
    """Returns the tag of the values of a type."""
    kind = get_origin(annotation) or annotation
    if kind is Annotated:
        return _find_type_tag(get_args(annotation)[0])
    return _TAGS[str if kind is Literal else dict if issubclass(kind, BaseModel) else kind]


def types_within(annotation: Any) -> Iterator[Any]:
    """Yields a type, without its parameters, and all types within it."""
    yield get_origin(annotation) or annotation
    for argument in get_args(annotation):
        yield from types_within(argument)


def body_config(**example: Any) -> ConfigDict:
    """Returns the configuration of a body, with an example for OpenAPI. OpenAPI does not list the keys that are ignored."""
    return ConfigDict(strict=True, json_schema_extra={"examples": [example], "additionalProperties": False})


MAX_TOP_K = 1000  # results of an input, each computed by itself, whatever --max-top-k is
# Maximum items of a list, whatever --max-inputs is: reading a body blocks the event loop, and a body of 2 MiB can contain a million items.
MAX_ITEMS = 2**13
# without fail_fast a list of invalid items would create an error per item
LIST_LIMIT = Field(fail_fast=True, max_length=MAX_ITEMS)

TextOrTexts = Annotated[
    str | Annotated[list[str], LIST_LIMIT], one_of("a text or a list of texts"), Field(description="One or more texts.")
]
Indices = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=256)]  # indices of layers or heads
Truncate = Annotated[bool | None, Field(description="Truncate long texts; otherwise they are an error.")]
TruncationDirection = Annotated[AnyCase[Literal["left", "right"]] | None, Field(description="End to truncate; by default the model's own.")]
Stride = Annotated[int | None, Field(ge=0, description="Tokens shared by neighboring windows; by default 128, or half a window if less.")]
OffsetUnit = Annotated[AnyCase[Unit], Field(description="Unit of `start` and `end`; `utf16` for JavaScript.")]


@functools.cache
def field_names(model_type: type[BaseModel]) -> frozenset[str]:
    """Returns the names of a class's fields; they are needed for each item of a list."""
    return frozenset(model_type.model_fields)


class ClosedModel(BaseModel):
    """An object within a body, such as `parameters`. An unknown name is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_name(cls, value: Any) -> Any:
        """Stops at the first unknown name: `extra="forbid"` creates an error for each name, which takes seconds for a million names."""
        # JSON creates no subclasses of dict, and this runs for each item of a list
        if type(value) is dict and not value.keys() <= field_names(cls):
            unknown = next(name for name in value if name not in field_names(cls))
            raise PydanticCustomError("unknown_name", "unknown", {"name": unknown, "known": list(cls.model_fields)})
        return value


class TaskBody(BaseModel):
    """Base of all request bodies: one field contains the input or a list of inputs. Most bodies also have `parameters`."""

    # Class of the `parameters`, from the field; one without fields if there are none.
    parameters_type: ClassVar[type[ClosedModel]] = ClosedModel
    # The `parameters` of a body without them. They are frozen, so all requests share them.
    default_parameters: ClassVar[Any] = None
    # Whether `top_k` is limited by --max-top-k, because the results of an input are computed one by one.
    top_k_is_limited: ClassVar[bool] = False
    # Whether a single input gets the same response as a list of one, as clients of this path expect.
    always_list: ClassVar[bool] = False
    # The field of the inputs.
    input_name: ClassVar[str] = "inputs"

    model: Annotated[str | None, Field(description="Name of the model, if several can do the task.")] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Stores the class of the parameters and their defaults."""
        if "parameters" in cls.model_fields:
            types = types_within(cls.model_fields["parameters"].annotation)
            cls.parameters_type = next(kind for kind in types if isinstance(kind, type) and issubclass(kind, ClosedModel))
            cls.default_parameters = cls.parameters_type.model_construct()

    @classmethod
    def example(cls) -> dict[str, Any]:
        """Returns the example of `body_config`, which OpenAPI shows."""
        config: Any = cls.model_config
        return config["json_schema_extra"]["examples"][0]

    @functools.cached_property
    def items(self) -> Sequence[Any]:
        """The inputs as a list."""
        inputs = getattr(self, self.input_name)
        return inputs if isinstance(inputs, list) else [inputs]

    @property
    def is_list(self) -> bool:
        """Whether the caller sent a list, which gets a list of results."""
        return isinstance(getattr(self, self.input_name), list)

    @property
    def count(self) -> int:
        """Number of texts, pairs or questions in the body."""
        return len(self.items)

    def texts_by_input(self) -> Iterator[Iterable[str]]:
        """Yields the texts of each input that count for the limit of characters: the input, its fields, and the texts in its lists."""
        for item in self.items:
            values = [item] if isinstance(item, str) else [value for _, value in item]
            yield [text for value in values for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns the inputs with their parameters, as the task's function takes them; `config` gives the model's own settings."""
        raise NotImplementedError

    def to_response(self, results: list[Any]) -> Any:
        """Returns the value of the response's body from one result per input: a list for a list, unless `always_list`."""
        return results if self.always_list or self.is_list else results[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request: the number of its inputs, the characters of each text, and results that are computed one by one."""

    max_inputs: int
    max_chars: int
    max_top_k: int = MAX_TOP_K


TRUSTED_LIMITS = Limits(max_inputs=1_000_000, max_chars=100_000_000)  # limits for the user's own files, not for requests
