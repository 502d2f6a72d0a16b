"""Reads a request body: checks its fields and limits, and turns pydantic's errors into one sentence each."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from bertserve.service.body.json_text import MIN_CHECKED_BYTES, check_size
from bertserve.service.body.task_body import TAGS, ClosedModel, Limits, TaskBody, field_names
from bertserve.service.errors import CallerValue, InvalidValueError, MalformedRequestError, TooLargeError
from bertserve.service.messages import SHOWN_CHARS, did_you_mean, quote_names, requirement

_SHOWN_CHARS = 40  # characters of a wrong value that a message shows
# How bodies in other formats begin, and what an error says about them.
_OTHER_FORMATS = {
    rb"\x1f\x8b": "it looks like gzip, so send it uncompressed",
    rb"\xff\xfe|\xfe\xff|.?\0": "it looks like UTF-16 and must be UTF-8",
    rb"[\w.%+-]+=|--": "it looks like a form",
    rb"\{[^\n]*\}[ \r]*\n\s*\{": "it looks like JSON Lines, which tasks take with the header `content-type: application/x-ndjson`",
}

# Name and value of an unknown field -> whether it can be ignored.
IgnoresField = Callable[[str, Any], bool]
B = TypeVar("B", bound=TaskBody)
C = TypeVar("C", bound=ClosedModel)


def parse_json(raw: bytes, body: type[TaskBody] | None = None) -> Any:
    """Parses a body; `body` is its class, for the example in an error. `NaN` and `Infinity` become numbers, which no field accepts.

    Raises:
        MalformedRequestError: The body is not JSON.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    try:
        if len(raw) >= MIN_CHECKED_BYTES:
            check_size(raw)
        # not `model_validate_json`, which creates Python objects for each Python validator, and again for the error
        return from_json(raw)
    except ValueError as error:
        # in a document of one line, the line number is meaningless: it can be any line of JSON Lines
        reason = str(error) if b"\n" in raw.strip() else str(error).replace(" at line 1 column ", " at column ")
        problem = next((problem for pattern, problem in _OTHER_FORMATS.items() if re.match(pattern, raw)), reason)
        example = "" if body is None else f", such as {json.dumps(body.example())}"
        raise MalformedRequestError(
            "the body is not valid JSON: {problem}; send JSON{example}.", problem=problem, example=example
        ) from error


def read_protocol(body_type: type[C], raw: bytes, example: Mapping[str, Any]) -> C:
    """Reads the body of a protocol that contains the values of a task's body; `example` is a valid body.

    Raises:
        MalformedRequestError: The body is not JSON.
        InvalidValueError: The JSON does not match the class.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    try:
        return body_type.model_validate(parse_json(raw))
    except ValidationError as error:
        raise _translate(error, example) from error


def validate_as(body_type: type[B], value: Any, limits: Limits, ignores: IgnoresField | None = None) -> B:
    """Validates the JSON value of a request body of a class, except for the fields that `ignores` accepts.

    Raises:
        InvalidValueError: The value does not match the class.
        TooLargeError: A list or a text exceeds its limit.
    """
    if not isinstance(value, dict):
        kinds = {str: "a text", list: "a list", bool: "a truth value", int: "a number", float: "a number"}  # most often only the inputs
        raise InvalidValueError(
            "the body is {problem}, but must be an object with {known}, such as {example}.",
            problem=kinds.get(type(value), "null"),
            known=quote_names(required_fields(body_type)),
            example=json.dumps(body_type.example()),
        )
    if not value.keys() <= field_names(body_type):
        # the check stops at the first wrong field, so a million fields cost no more
        for name, content in value.items():
            if name not in field_names(body_type) and (ignores is None or not ignores(name, content)):
                raise _unknown_field_error(name, body_type)
    try:
        body = body_type.model_validate(value)
    except ValidationError as validation_error:
        raise _translate(validation_error, body_type.example(), body_type) from validation_error
    if body.count > limits.max_inputs:
        raise TooLargeError(
            "the request has {count} inputs, counting each label, choice, sentence and ranked text, and {max_inputs} are allowed; split "
            "the request; the operator can raise --max-inputs.",
            count=body.count,
            max_inputs=limits.max_inputs,
        )
    if body.top_k_is_limited and (parameters := getattr(body, "parameters", None)) is not None and parameters.top_k > limits.max_top_k:
        raise TooLargeError(
            "`top_k` is {top_k} and {max_top_k} is allowed; make it smaller; the operator can raise --max-top-k.",
            top_k=CallerValue(parameters.top_k),
            max_top_k=limits.max_top_k,
        )
    for index, texts in enumerate(body.texts_by_input()):
        for text in texts:
            if len(text) > limits.max_chars:
                error = TooLargeError(
                    "the text has {chars} characters and {max_chars} are allowed; split it; the operator can raise --max-chars.",
                    chars=len(text),
                    max_chars=limits.max_chars,
                )
                error.input_index = index
                error.prefix_input(is_list=body.is_list, input_name=body.input_name)
                raise error
    return body


def required_fields(body: type[TaskBody]) -> list[str]:
    """Returns the required fields of a body: `inputs`, or the fields that replace it."""
    return [name for name, field in body.model_fields.items() if field.is_required() and name != "parameters"]


def check_names(names: Iterable[str], known: Sequence[str], holder: str, error_class: type[InvalidValueError] = InvalidValueError) -> None:
    """Refuses the first name that is not known.

    Raises:
        InvalidValueError: A name is unknown. The message suggests the most similar one.
    """
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise _unknown_name_error(unknown, holder, known, error_class)


def _translate(error: ValidationError, example: Mapping[str, Any], body: type[TaskBody] | None = None) -> InvalidValueError | TooLargeError:
    """Turns pydantic's first error into one sentence; `example` is a valid body, and `body` is None for the body of a protocol."""
    first = error.errors(include_url=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part not in TAGS)
    field_path = "".join(parts).lstrip(".")  # such as `inputs[2].text`
    if body is not None and first["type"] == "too_long" and not field_path.startswith("parameters"):
        return TooLargeError(
            "`{field_path}` has {first_count} items and at most {limit} are allowed; split the request.",
            field_path=field_path,
            first_count=len(first["input"]),
            limit=first["ctx"]["max_length"],
        )
    if first["type"] == "unknown_name":
        name, known = first["ctx"]["name"], first["ctx"]["known"]
        if body is not None and field_path == "parameters" and name in field_names(body):
            return InvalidValueError(
                "`parameters` does not take `{field}`; put it next to {known}.", field=name, known=quote_names(required_fields(body))
            )
        return _unknown_name_error(name, f"`{field_path}`" if field_path else "the body", known)
    return _wrong_value_error(first, field_path, example)


def _unknown_name_error(
    name: str, holder: str, known: Sequence[str], error_class: type[InvalidValueError] = InvalidValueError, *, otherwise: str = ""
) -> InvalidValueError:
    """Returns the error of an unknown name, with the known ones.

    `holder` is the object that lacks it, and `otherwise` the hint if no known name is similar.
    """
    hint = did_you_mean(name[:SHOWN_CHARS].lower(), known, otherwise)
    remedy = f"{hint + ' Known' if hint else 'known'} names are {quote_names(known)}" if known else "leave it out"
    return error_class("{holder} does not take `{name}`; {remedy}.", holder=holder, name=CallerValue(name), remedy=remedy)


def _unknown_field_error(name: str, body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of an unknown name at the top of a body."""
    parameters = list(body.parameters_type.model_fields)
    if name in parameters:
        return InvalidValueError("the body does not take `{field}`; put it into `parameters`.", field=name)
    hint = did_you_mean(name[:SHOWN_CHARS].lower(), parameters, name_format="`{}` in `parameters`")
    return _unknown_name_error(name, "the body", list(body.model_fields), otherwise=hint)


def _wrong_value_error(error: ErrorDetails, field_path: str, example: Mapping[str, Any]) -> InvalidValueError:
    """Returns one of pydantic's errors, for a missing or wrong value, as one sentence; `example` is a valid body."""
    if not field_path:
        return InvalidValueError("the body {message}, such as {example}.", message=requirement(error), example=json.dumps(example))
    if error["type"] == "missing":
        return InvalidValueError(
            "`{field_path}` is missing; send JSON such as {example}.", field_path=field_path, example=json.dumps(example)
        )
    message, item = requirement(error), example.get("inputs")
    if error["type"] == "model_type" and field_path.startswith("inputs") and "." not in field_path and isinstance(item, dict):
        message += f" such as {json.dumps(item)}"
    if isinstance(error["input"], dict | list):  # its description, such as its length, would say nothing about its contents
        return InvalidValueError("`{field_path}` {message}.", field_path=field_path, message=message)
    return InvalidValueError(
        "`{field_path}` {message}; it is {value}.", field_path=field_path, message=message, value=describe_value(error["input"])
    )


def describe_value(value: Any) -> CallerValue | str:
    """Returns a value of a body for a message: the start of a text or a number, otherwise a description."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    # one character more than is shown, so that a longer text ends with an ellipsis
    shown = json.dumps(value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value, ensure_ascii=False, default=str)
    return CallerValue(shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…")
