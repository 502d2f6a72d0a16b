"""Errors of a whole body: it is not JSON, is not an object, or has a field that would have no effect. It does not depend on HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertserve.service.errors import CallerValue, InvalidValueError, MalformedRequestError, did_you_mean
from bertserve.service.tasks.body import TaskBody, field_names

# Fields that clients of other services send next to `inputs`, with the values that change nothing here. None means any value.
IGNORED_FIELDS: Mapping[str, Sequence[Any] | None] = {
    "options": None,  # the Inference API sends it; `IGNORED_OPTIONS` are its names
    "use_cache": None,
    "wait_for_model": None,
    "user": None,  # the name of the end user, in the OpenAI API
    "stream": (False, None),  # answers are not streamed
    "encoding_format": ("float", None),  # only vectors have other formats
}
# Names in `options` of the Inference API and its clients. They are about waiting for a model and about caches.
IGNORED_OPTIONS = (
    "use_cache",
    "wait_for_model",
    "use_gpu",
    "dont_load_model",
    "retry_on_error",
    "includeCredentials",
    "taskHint",
    "signal",
)


def check_fields(value: Mapping[str, Any], body: type[TaskBody]) -> None:
    """Checks that all fields of a body are known or harmless.

    Raises:
        InvalidValueError: A field is unknown or not supported. The message says where it belongs, or has the most similar name.
    """
    # the check stops at the first wrong field, so a million fields cost no more
    for name, content in value.items():
        if name in field_names(body) or (content is None and body.ignores_null_fields):
            continue
        if name not in IGNORED_FIELDS:
            raise _unknown_field_error(name, body)
        allowed = IGNORED_FIELDS[name]
        if allowed is not None and content not in allowed:
            raise InvalidValueError("`{field}` asks for a response format that this endpoint does not have; remove `{field}`.", field=name)
        if name == "options" and content is not None:
            if not isinstance(content, dict):
                raise InvalidValueError("`options` must be an object; fix or remove it.")
            check_names(content, IGNORED_OPTIONS, "`options`")


def quote_names(names: Sequence[str]) -> str:
    """Returns names for a message."""
    return ", ".join(f"`{name}`" for name in names)


def unknown_within_error(name: str, field_path: str, known: Sequence[str], body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of an unknown name in an object within a body, such as `parameters` or `inputs[3]`."""
    if field_path == "parameters" and name in field_names(body):
        return InvalidValueError(
            "`parameters` has no `{field}`; put it next to {known}.", field=name, known=quote_names(required_fields(body))
        )
    return unknown_name_error(name, f"`{field_path}`", known)


def unknown_name_error(
    name: str, holder: str, known: Sequence[str], error_class: type[InvalidValueError] = InvalidValueError, *, otherwise: str = ""
) -> InvalidValueError:
    """Returns the error of an unknown name, with the known ones.

    `holder` is the object that does not have it, and `otherwise` the hint if no known name is similar.
    """
    hint = did_you_mean(name.lower(), known, otherwise)
    remedy = f"{hint + ' Known' if hint else 'known'} names are {quote_names(known)}" if known else "leave it out"
    return error_class("{holder} has no `{name}`; {remedy}.", holder=holder, name=CallerValue(name), remedy=remedy)


def check_names(names: Iterable[str], known: Sequence[str], holder: str, error_class: type[InvalidValueError] = InvalidValueError) -> None:
    """Refuses the first name that is not known.

    Raises:
        InvalidValueError: A name is unknown. The message has the most similar one.
    """
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise unknown_name_error(unknown, holder, known, error_class)


def required_fields(body: type[TaskBody]) -> list[str]:
    """Returns the required fields of a body: `inputs`, or the fields that replace it."""
    return [name for name, field in body.model_fields.items() if field.is_required() and name != "parameters"]


def _unknown_field_error(name: str, body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of an unknown name at the top of a body."""
    parameters = list(body.parameters_type.model_fields)
    if name in parameters:
        return InvalidValueError("the body has no `{field}`; put it into `parameters`.", field=name)
    hint = did_you_mean(name.lower(), parameters, name_format="`{}` in `parameters`")
    return unknown_name_error(name, "the body", list(body.model_fields), otherwise=hint)


def invalid_json_error(raw: bytes, reason: str, body: type[TaskBody] | None) -> MalformedRequestError:
    """Returns the error of a body that is not JSON; `reason` is the parser's error, and `body` is None if no task has this body."""
    # in a document of one line, the line number has no meaning: it can be any line of JSON Lines
    problem = reason if b"\n" in raw.strip() else reason.replace(" at line 1 column ", " at column ")
    example = "" if body is None else f", such as {json.dumps(body.example())}"
    return MalformedRequestError("the body is not valid JSON: {problem}; send JSON{example}.", problem=problem, example=example)


def not_an_object_error(value: object, body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of a body that is JSON, but not an object. Most often it has only the inputs."""
    kinds = {str: "a text", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return InvalidValueError(
        "the body is {problem}, but must be an object with {known}, such as {example}.",
        problem=kinds.get(type(value), "null"),
        known=quote_names(required_fields(body)),
        example=json.dumps(body.example()),
    )
