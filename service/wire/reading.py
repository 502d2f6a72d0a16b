"""Reads a request body: limits, and pydantic's errors turned into one sentence each."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from service.errors import InvalidValueError, MalformedRequestError, TooLargeError
from service.tasks.body import TAGS, TaskBody
from service.tasks.catalog import TASKS


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may measure.

    Attributes:
        max_inputs: Inputs in one request.
        max_chars: Characters of one text.
    """

    max_inputs: int
    max_chars: int


def read_body(task: str, raw: bytes, limits: Limits) -> TaskBody:
    """Reads a request body of a task.

    Raises:
        MalformedRequestError: It is not JSON.
        InvalidValueError: It is not the JSON that the task takes.
        TooLargeError: A list or a text is over its limit.
    """
    try:
        # not `model_validate_json`: it makes Python objects for each validator in Python, and again for the error
        value = from_json(raw)
    except ValueError as error:
        raise MalformedRequestError(f"the body is not valid JSON: {error}.") from error
    try:
        body = TASKS[task].body.model_validate(value)
    except ValidationError as error:
        raise _translate(error, TASKS[task].body) from error
    _check(body, limits)
    return body


def _check(body: TaskBody, limits: Limits) -> None:
    if body.count > limits.max_inputs:
        raise TooLargeError(
            f"{body.counted.format(body.count)} and {limits.max_inputs} are allowed; split the request, or raise --max-inputs."
        )
    for index, item in enumerate(body.items):
        for text in body.texts_of(item):
            if len(text) > limits.max_chars:
                error = TooLargeError(
                    f"the text has {len(text)} characters and {limits.max_chars} are allowed; split it, or raise --max-chars."
                )
                error.input_index = index
                error.name_input(many=body.is_list, subject=body.subject)
                raise error


def _translate(error: ValidationError, body: type[TaskBody]) -> InvalidValueError | TooLargeError:
    """Turns pydantic's first error into one sentence."""
    first = error.errors(include_url=False)[0]
    where = _path([part for part in first["loc"] if part not in TAGS])
    if first["type"] == "too_long" and not where.startswith("parameters"):
        limit = first["ctx"]["max_length"]
        return TooLargeError(f"`{where}` has {len(first['input'])} items and no more than {limit} are ever allowed; split the request.")
    if first["type"] == "unknown_parameter":
        known = list(body.parameters_type.model_fields)
        name = str(first["ctx"]["name"])[:64]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return InvalidValueError(f"`parameters` has no `{name}`; {hint}Known are {', '.join(f'`{field}`' for field in known)}.")
    given = "" if first["type"] == "missing" else f"; it is {_show(first['input'])}"
    # what pydantic calls a dictionary or an instance of a class is to the caller an object
    message = "input should be an object" if first["type"] == "model_type" else first["msg"][0].lower() + first["msg"][1:]
    return InvalidValueError(f"`{where or 'the body'}` is wrong: {message}{given}.")


def _path(parts: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _show(value: Any) -> str:
    """Returns a value for a message: short ones as they are, others by their kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    shown = json.dumps(value[:41] if isinstance(value, str) else value, ensure_ascii=False)
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
