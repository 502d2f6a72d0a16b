"""The wire: pydantic models of request and response bodies, which OpenAPI is generated from, and how a body is read.

Unknown keys beside `inputs` are ignored, because clients send `options` and more; an unknown name in `parameters` is an
error, because it would silently do nothing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError

from service.errors import InvalidValueError, MalformedRequestError, TooLargeError
from service.tasks import classify

# Tags of the union below; pydantic puts them into error locations, where nobody wants to read them.
_TEXT, _PAIR, _LIST = "<text>", "<pair>", "<list>"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may measure.

    Attributes:
        max_inputs: Inputs in one request.
        max_chars: Characters of one text.
    """

    max_inputs: int
    max_chars: int


class Body(BaseModel):
    """What all request bodies share."""

    model_config = ConfigDict(strict=True)

    model: Annotated[str | None, Field(description="Name of the model, where several are loaded for the task.")] = None


class Parameters(BaseModel):
    """Base of all `parameters`: an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPair(BaseModel):
    """A text and a second text that belongs to it."""

    model_config = ConfigDict(strict=True)

    text: str
    text_pair: str | None = None


def _kind(value: Any) -> str | None:
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = ((str, _TEXT), ((dict, TextPair), _PAIR), (list, _LIST))
    return next((tag for type_, tag in kinds if isinstance(value, type_)), None)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_Text = Annotated[str, Tag(_TEXT)]
_Pair = Annotated[TextPair, Tag(_PAIR)]
_One = Annotated[
    _Text | _Pair,
    Discriminator(_kind, custom_error_type="input", custom_error_message="must be a text or {text, text_pair}"),
]
_OneOrList = Annotated[
    # without fail_fast a body of a million wrong items would make a million errors
    _Text | _Pair | Annotated[list[_One], Field(fail_fast=True), Tag(_LIST)],
    Discriminator(_kind, custom_error_type="input", custom_error_message="must be a text, {text, text_pair}, or a list of these"),
]


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
    stride: Annotated[int, Field(ge=0, description="Tokens that neighboring windows share.")] = 128


class ClassifyBody(Body):
    """Body of a text classification request."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"inputs": "A warm, funny and thoroughly engaging film.", "parameters": {"top_k": 1}}]},
    )

    inputs: Annotated[_OneOrList, Field(description="A text, a pair, or a list of these.")]
    parameters: ClassifyParameters | None = None

    def requests(self) -> list[classify.Request]:
        """Returns one task request per input."""
        items = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        options = (self.parameters or ClassifyParameters()).model_dump()
        return [
            classify.Request(item, **options) if isinstance(item, str) else classify.Request(item.text, item.text_pair, **options)
            for item in items
        ]


class LabelScore(BaseModel):
    """One label with its score."""

    label: str
    score: float


class ErrorBody(BaseModel):
    """Every error: one sentence of what was wrong and what to change, and its kind."""

    error: str
    error_type: str
    request_id: str


BODIES: dict[str, type[ClassifyBody]] = {classify.TASK: ClassifyBody}


def read(task: str, raw: bytes, limits: Limits) -> ClassifyBody:
    """Reads a request body of a task.

    Raises:
        MalformedRequestError: It is not JSON.
        InvalidValueError: It is not the JSON that the task takes.
        TooLargeError: A list or a text is over its limit.
    """
    try:
        body = BODIES[task].model_validate_json(raw)
    except ValidationError as error:
        raise _translate(error) from error
    _check(body.inputs, limits)
    return body


def is_list(body: ClassifyBody) -> bool:
    """Returns whether the caller sent a list of inputs, so that errors should name the one at fault."""
    return isinstance(body.inputs, list)


def _check(inputs: Any, limits: Limits) -> None:
    items: Sequence[Any] = inputs if isinstance(inputs, list) else [inputs]
    if len(items) > limits.max_inputs:
        raise TooLargeError(
            f"`inputs` has {len(items)} items and {limits.max_inputs} are allowed; split the request, or raise --max-inputs."
        )
    for index, item in enumerate(items):
        for text in [item] if isinstance(item, str) else [item.text, item.text_pair or ""]:
            if len(text) > limits.max_chars:
                error = TooLargeError(
                    f"the text has {len(text)} characters and {limits.max_chars} are allowed; split it, or raise --max-chars."
                )
                error.input_index = index
                error.name_input(many=isinstance(inputs, list))
                raise error


def _translate(error: ValidationError) -> MalformedRequestError | InvalidValueError:
    """Turns pydantic's first error into one sentence."""
    first = error.errors(include_url=False)[0]
    where = _path([part for part in first["loc"] if part not in (_TEXT, _PAIR, _LIST)])
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "invalid"))
        return MalformedRequestError(f"the body is not valid JSON: {reason}.")
    if first["type"] == "extra_forbidden":
        known = list(ClassifyParameters.model_fields)
        name = str(first["loc"][-1])[:64]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return InvalidValueError(f"`parameters` has no `{name}`; {hint}Known are {', '.join(f'`{field}`' for field in known)}.")
    given = "" if first["type"] == "missing" else f"; it is {_show(first['input'])}"
    message = first["msg"][0].lower() + first["msg"][1:]
    return InvalidValueError(f"`{where or 'the body'}` is wrong: {message}{given}.")


def _path(parts: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _show(value: Any) -> str:
    """Returns a value for a message: short ones as they are, others by their kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
