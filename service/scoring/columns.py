"""Columns: which columns of a row are the inputs of a task, and the request of a row. It is derived from the list of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import SHOWN_CHARS, CallerError, InvalidValueError, Sent, SettingsError, did_you_mean
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS, tasks_of
from bertserve.service.tasks.reading import requested_task, validate_as
from bertserve.service.tasks.spec import TEXT, types_within
from bertserve.service.tasks.unknown_fields import listed, required


@dataclass(frozen=True, slots=True)
class RowTask:
    """What to do with each row."""

    task: str | None = None  # name or path; None for the model's own, or the one that parameters or columns imply
    columns: Mapping[str, str] = field(default_factory=dict)  # by input of the task; without any, each input has a column of its name
    parameters: Mapping[str, Any] = field(default_factory=dict)  # as at the endpoint
    empty: Literal["warn", "reject"] = "warn"  # the handling of rows with an empty text
    names: Sequence[str] = ("prediction", "warnings")  # the columns that the output adds


class Columns:
    """Builds requests from rows, and validates them like the endpoint.

    Attributes:
        spec: The task.
        by_field: Field of the task -> column.
        answer_bytes: Maximum bytes of an answer; 0 if answers are small.
    """

    def __init__(self, task: RowTask, manifest: Manifest, limits: Limits) -> None:
        """Checks the task for a model, and its parameters with the example of the endpoint; a `SettingsError` says what is wrong."""
        self._task, self._manifest, self._limits = task, manifest, limits
        parameters, columns, tasks = dict(task.parameters), dict(task.columns), tasks_of(manifest)
        implied = requested_task(manifest.task, parameters | columns | {"inputs": columns, "parameters": parameters})
        name = next((name for name, spec in TASKS.items() if task.task in (name, spec.path)), task.task or implied)
        if name not in tasks:
            raise SettingsError(f"the task is `{name}`, but the model supports {', '.join(tasks)}; choose one with --task.")
        self.spec, self._body_keys = TASKS[name], required(TASKS[name].body)
        fields = self.spec.input_fields
        if unknown := [name for name in columns if name not in fields]:
            raise SettingsError(f"--{_flag(unknown[0])} is for other tasks; {name} has the inputs {listed(list(fields))}.")
        self._needed = {name for name, info in fields.items() if info.is_required()}
        self._required = self._needed | columns.keys()
        self._lists = {name for name, info in fields.items() if list in types_within(info.annotation)}
        self.by_field = {name: columns.get(name, name) for name in fields if not columns or name in self._required}
        if foreign := [key for key in parameters if key in ("model", *self._body_keys)]:
            raise SettingsError(f"--parameters has `{foreign[0]}`, which is not a parameter of /{self.spec.path}; remove it.")
        has_object = parameters and self.spec.body.parameters_type.model_fields
        self._parameters = {"parameters": parameters} if has_object else parameters
        example = {key: value for key, value in self.spec.body.example().items() if key in self._body_keys}
        try:
            body = validate_as(self.spec.body, example | self._parameters, Limits(max_inputs=2**14, max_chars=2**20))
            request = body.requests(manifest)[0]
        except CallerError as error:
            raise SettingsError(f"--parameters does not fit /{self.spec.path}: {error.message}") from error
        self.answer_bytes = 0 if self.spec.answer_bytes is None else self.spec.answer_bytes(request, manifest)

    def check(self, columns: Sequence[str], added: Sequence[str]) -> None:
        """Raises a `SettingsError` if a file lacks a required column, or the output would have a column twice."""
        for name, column in self.by_field.items():
            if name in self._required and column not in columns:
                hint = did_you_mean(column, columns, f"choose one with --{_flag(name)}.")
                if len(columns) == 1 and any(delimiter in columns[0] for delimiter in ",;|\t"):
                    hint = "separate columns by commas, not by semicolons or `|`, or by tabs with --input-format tsv."
                shown = listed([name[:SHOWN_CHARS] for name in columns[:20]])
                raise SettingsError(f"the input has no column `{column}`, but it has {shown}; {hint}")
        ((name, count),) = Counter([*columns, *added]).most_common(1)
        if count > 1:
            hint = "rename it, or set --prediction-column or --warnings-column."
            raise SettingsError(f"the output would have the column `{name[:SHOWN_CHARS]}` twice; {hint}")

    def request(self, values: Mapping[str, Any]) -> Any:
        """Returns the request of a row, given its values by column, or raises a `CallerError`."""
        inputs: dict[str, Any] = {}
        for name, column in self.by_field.items():
            value, is_list = values.get(column), name in self._lists
            if name in self._required and column not in values:
                raise InvalidValueError(
                    "the row has no column `{column}`; it has {columns}.", column=column, columns=Sent(listed(list(values)[:20]))
                )
            if self._task.empty == "reject" and name in self._needed and isinstance(value, str) and not value.strip():
                raise InvalidValueError("the column `{column}` is empty, and --empty is `reject`.", column=column)
            if is_list and isinstance(value, str):
                with suppress(orjson.JSONDecodeError):
                    value = orjson.loads(value)
            if is_list != isinstance(value, list):  # the endpoint reads a list of texts as several inputs
                kind = 'a JSON list of texts, such as ["a", "b"]' if is_list else "a text, and it is a list"
                raise InvalidValueError("the column `{column}` must be {kind}.", column=column, kind=kind)
            if name in self._needed or value not in (None, ""):
                inputs[name] = value
        if self._body_keys == ["inputs"]:
            inputs = {"inputs": inputs[TEXT] if list(inputs) == [TEXT] else inputs}
        (request,) = validate_as(self.spec.body, inputs | self._parameters, self._limits).requests(self._manifest)
        return request


def _flag(name: str) -> str:
    return name.replace("_", "-")
