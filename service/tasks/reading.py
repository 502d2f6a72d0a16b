"""Reads a request body: finds its task, checks limits, and turns pydantic's errors into one sentence each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bertserve.service.errors import CallerValue, InvalidValueError, TooLargeError, requirement
from bertserve.service.tasks.body import TAGS, ClosedModel, Limits, TaskBody, field_names
from bertserve.service.tasks.body_errors import (
    check_fields,
    invalid_json_error,
    not_an_object_error,
    unknown_name_error,
    unknown_within_error,
)
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.json_text import parse

_SHOWN_CHARS = 40  # characters of a wrong value that a message shows

B = TypeVar("B", bound=TaskBody)
C = TypeVar("C", bound=ClosedModel)


def read_as(body_type: type[B], raw: bytes, limits: Limits) -> B:
    """Reads a request body of a class.

    Raises:
        MalformedRequestError: The body is not JSON.
        InvalidValueError: The JSON does not match the class.
        TooLargeError: A list or a text exceeds its limit.
    """
    return validate_as(body_type, parse_json(raw, body_type), limits)


def parse_json(raw: bytes, body: type[TaskBody] | None = None) -> Any:
    """Parses a body; `body` is its class, for the example in an error.

    Raises:
        MalformedRequestError: The body is not JSON.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    try:
        # not `model_validate_json`, which creates Python objects for each Python validator, and again for the error
        return parse(raw)
    except ValueError as error:
        raise invalid_json_error(raw, str(error), body) from error


def read_protocol(body_type: type[C], raw: bytes, example: Mapping[str, Any]) -> C:
    """Reads the body of a protocol that has the values of a task's body within it; `example` is a valid body.

    Raises:
        MalformedRequestError: The body is not JSON.
        InvalidValueError: The JSON does not match the class.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    try:
        return body_type.model_validate(parse_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "unknown_name":
            holder = f"`{_path_in_body(first['loc'])}`" if first["loc"] else "the body"
            raise unknown_name_error(first["ctx"]["name"], holder, first["ctx"]["known"]) from error
        raise _wrong_value_error(first, example) from error


def requested_task(task: str, value: Any) -> str:
    """Returns the task that a body requests, by default the model's own. `validate_as` reports a body that is not an object."""
    derived = ((spec.name, spec.derivation) for spec in TASKS.values() if spec.derivation is not None)
    return next((name for name, derivation in derived if derivation.base in (None, task) and _has(value, derivation.discriminator)), task)


def _has(value: Any, keys: tuple[str, ...]) -> bool:
    """Returns whether an object has a path of nested keys."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def validate_as(body_type: type[B], value: Any, limits: Limits) -> B:
    """Validates the JSON value of a request body of a class.

    Raises:
        InvalidValueError: The value does not match the class.
        TooLargeError: A list or a text exceeds its limit.
    """
    if not isinstance(value, dict):
        raise not_an_object_error(value, body_type)
    if not value.keys() <= field_names(body_type):
        check_fields(value, body_type)
    try:
        body = body_type.model_validate(value)
    except ValidationError as validation_error:
        raise _translate(validation_error, body_type) from validation_error
    if body.count > limits.max_inputs:
        raise TooLargeError(
            "the request has {count} inputs, counting each label, choice, sentence and ranked text, and {max_inputs} are allowed; split "
            "the request; the operator can raise --max-inputs.",
            count=body.count,
            max_inputs=limits.max_inputs,
        )
    if body.top_k_is_limited and body.parameters is not None and body.parameters.top_k > limits.max_top_k:
        raise TooLargeError(
            "`top_k` is {top_k} and {max_top_k} is allowed; make it smaller; the operator can raise --max-top-k.",
            top_k=CallerValue(body.parameters.top_k),
            max_top_k=limits.max_top_k,
        )
    for index, item in enumerate(body.items):
        for text in body.texts_of(item):
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


def _translate(error: ValidationError, body: type[TaskBody]) -> InvalidValueError | TooLargeError:
    """Turns pydantic's first error into one sentence."""
    first = error.errors(include_url=False)[0]
    field_path = _path_in_body([part for part in first["loc"] if part not in TAGS])
    if first["type"] == "too_long" and not field_path.startswith("parameters"):
        limit = first["ctx"]["max_length"]
        return TooLargeError(
            "`{field_path}` has {first_count} items and at most {limit} are allowed; split the request.",
            field_path=field_path,
            first_count=len(first["input"]),
            limit=limit,
        )
    if first["type"] == "unknown_name":
        return unknown_within_error(first["ctx"]["name"], field_path, first["ctx"]["known"], body)
    return _wrong_value_error(first, body.example())


def _wrong_value_error(error: ErrorDetails, example: Mapping[str, Any]) -> InvalidValueError:
    """Returns one of pydantic's errors, for a missing or wrong value, as one sentence; `example` is a valid body."""
    field_path = _path_in_body([part for part in error["loc"] if part not in TAGS])
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
    return InvalidValueError("`{field_path}` {message}; it is {value}.", field_path=field_path, message=message, value=show(error["input"]))


def _path_in_body(parts: Sequence[int | str]) -> str:
    """Returns a position in a body, such as `inputs[2].text`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def show(value: Any) -> CallerValue | str:
    """Returns a value of a body for a message: the start of a text or a number, otherwise a description."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    # one character more than is shown, so that a longer text ends with an ellipsis
    shown = json.dumps(value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value, ensure_ascii=False, default=str)
    return CallerValue(shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…")
