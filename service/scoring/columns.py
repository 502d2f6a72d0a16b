"""Columns: maps columns of a row to inputs of a task, and builds the request body. It is derived from the list of tasks."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin

from pydantic import BaseModel

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError, CallerError, InvalidValueError, Sent, SettingsError, did_you_mean
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.wire.reading import parse_json, validate_as
from bertserve.service.wire.unknown_fields import listed, required

TEXT = "text"
Empty = Literal["warn", "reject"]


@dataclass(frozen=True, slots=True)
class InputField:
    """An input of a task, with its name in a body; a list of texts is written as JSON in text files."""

    name: str
    needed: bool
    is_list: bool


def input_fields(spec: TaskSpec) -> dict[str, InputField]:
    """Returns a task's inputs by name: keys of objects in `inputs`, `text` if an input can be a text, or the fields without `inputs`."""
    keys = required(spec.body)
    if keys != ["inputs"]:
        model_fields = {name: spec.body.model_fields[name] for name in keys}
        return {name: InputField(name, True, list in _kinds(field.annotation)) for name, field in model_fields.items()}
    kinds = _kinds(spec.body.model_fields["inputs"].annotation)
    fields = {TEXT: InputField(TEXT, True, False)} if str in kinds else {}
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                fields[name] = InputField(name, field.is_required(), list in _kinds(field.annotation))
    return fields


def described_inputs() -> dict[str, str]:
    """Returns the help text for the column of each input of a task, by the input's name."""
    paths: dict[str, list[str]] = {}
    lists: set[str] = set()
    for spec in TASKS.values():
        for name, field in input_fields(spec).items():
            paths.setdefault(name, []).append(f"/{spec.path}")
            lists |= {name} if field.is_list else set()
    return {
        name: f"Column with `{name}`, for {', '.join(answering)}{'; a list, written as JSON in text files' if name in lists else ''}."
        for name, answering in paths.items()
    }


def options(annotation: Any) -> Iterator[Any]:
    """Yields the types that a value may have, without None."""
    if get_origin(annotation) in (Annotated, NotRequired):
        yield from options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            if option is not types.NoneType:
                yield from options(option)
    else:
        yield annotation


def _kinds(annotation: Any) -> list[Any]:
    """Returns these types; of a list only `list`, without its items."""
    return [get_origin(option) or option for option in options(annotation)]


def task_for(tasks: Sequence[str], requested: str | None, parameters: Mapping[str, Any], named: Mapping[str, str]) -> str:
    """Returns the task to score by: the requested one, or one that parameters or columns identify, or the model's own.

    Args:
        tasks: The tasks that the model answers, its own task first.
        requested: A task's name, or its path.
        parameters: The parameters.
        named: Field -> column, as configured.

    Raises:
        SettingsError: The model does not support the task.
    """
    if requested is not None:
        task = next((name for name, spec in TASKS.items() if requested in (name, spec.path)), requested)
        if task not in tasks:
            raise SettingsError(f"--task is `{requested}`, but the model supports {', '.join(tasks)}.")
        return task
    for name in tasks[1:]:
        derivation = TASKS[name].derivation
        if derivation is not None and (derivation.discriminator[-1] in parameters or derivation.discriminator[-1] in named):
            return name
    return tasks[0]


def read_parameters(text: str) -> dict[str, Any]:
    """Reads the parameters of each request from JSON.

    Raises:
        SettingsError: It is not a JSON object.
    """
    try:
        value = parse_json(text.encode())
    except BertServeError as error:
        raise SettingsError(f"--parameters is not JSON: {error.__cause__}; give an object such as '{{\"top_k\": 1}}'.") from error
    if not isinstance(value, dict):
        raise SettingsError("--parameters must be a JSON object, such as '{\"top_k\": 1}'.")
    return value


class Columns:
    """Builds request bodies from rows, and validates them like the endpoint."""

    def __init__(
        self,
        task: str,
        named: Mapping[str, str],
        parameters: Mapping[str, Any],
        limits: Limits,
        added: Sequence[str],
        empty: Empty = "warn",
    ) -> None:
        """Creates it.

        Args:
            task: The task.
            named: Field -> column; if empty, columns are found by the names of the fields.
            parameters: Parameters of each request, in the format of the endpoint.
            limits: The limits of a request.
            added: The columns that the output adds; the last one has the warnings.
            empty: The handling of rows without a text.

        Raises:
            SettingsError: A field does not belong to the task, a required field has no column, or the endpoint refuses the parameters.
        """
        self.task, self._limits, self._added, self._empty = task, limits, added, empty
        self._spec = TASKS[task]
        fields = input_fields(self._spec)
        if unknown := [name for name in named if name not in fields]:
            raise SettingsError(f"--{_flag(unknown[0])} is for other tasks; {task} has the inputs {listed(list(fields))}.")
        if named and (missing := [field.name for field in fields.values() if field.needed and field.name not in named]):
            raise SettingsError(f"--{_flag(missing[0])} is missing: {task} needs it, and columns are given only for {listed(list(named))}.")
        self.by_field = dict(named) or {name: name for name in fields}
        self._fields, self._optional = fields, not named
        if foreign := [name for name in parameters if name in ("model", *required(self._spec.body))]:
            raise SettingsError(f"--parameters has `{foreign[0]}`, which is not a parameter of /{self._spec.path}; remove it.")
        self._parameters = dict(parameters)
        if parameters and self._spec.body.parameters_type.model_fields:
            self._parameters = {"parameters": dict(parameters)}
        self._example = self._with_parameters()

    def check(self, columns: Sequence[str]) -> None:
        """Checks the columns of a file.

        Raises:
            SettingsError: A required column is missing, or the output would have a column twice.
        """
        for field, column in self.by_field.items():
            if column not in columns and (not self._optional or self._fields[field].needed):
                hint = did_you_mean(column, columns)
                raise SettingsError(
                    f"the input has no column `{column}`; {hint + ' It' if hint else 'it'} has {listed(columns[:20])}; choose one with --{_flag(field)}."
                )
        self._check_added(columns, SettingsError)

    def request(self, values: Mapping[str, Any], config: Any) -> Any:
        """Returns the request of a row, given its values by column and the model's manifest.

        Raises:
            CallerError: The endpoint would refuse it, a column that is required or that a flag names is missing, or the output would have a
                column twice.
        """
        self._check_added(values, InvalidValueError)
        inputs: dict[str, Any] = {}
        for name, column in self.by_field.items():
            field = self._fields[name]
            value = values.get(column)
            if column not in values and (field.needed or not self._optional):
                raise InvalidValueError(
                    "the row has no column `{column}`; it has {columns}.", column=column, columns=Sent(listed(list(values)[:20]))
                )
            if self._empty == "reject" and field.needed and isinstance(value, str) and not value.strip():
                raise InvalidValueError("the column `{column}` is empty, and --empty is `reject`.", column=column)
            if field.is_list and isinstance(value, str):
                value = self._list(column, value)
            elif isinstance(value, list) and not field.is_list:  # the endpoint reads it as several inputs
                raise InvalidValueError("the column `{column}` must be a text, and it is a list; write a row for each text.", column=column)
            if field.needed or value not in (None, ""):
                inputs[name] = value
        body = validate_as(self._spec.body, self._body(inputs), self._limits)
        (request,) = body.requests(config)
        return request

    def _body(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if required(self._spec.body) != ["inputs"]:
            return {**inputs, **self._parameters}
        return {"inputs": inputs[TEXT] if list(inputs) == [TEXT] else inputs, **self._parameters}

    def _list(self, column: str, value: str) -> Any:
        try:
            texts = parse_json(value.encode())
        except BertServeError as error:
            raise InvalidValueError("the column `{column}` must be a JSON list of texts, but is not JSON.", column=column) from error
        if not isinstance(texts, list):  # the endpoint's error would quote it
            raise InvalidValueError("the column `{column}` must be a JSON list of texts, but is other JSON.", column=column)
        return texts

    def answer_bytes(self, manifest: Manifest) -> int:
        """Returns the maximum bytes of an answer of a model; 0 if answers are small, or if each row will be rejected."""
        if self._spec.answer_bytes is None:
            return 0
        try:
            return self._spec.answer_bytes(self._example.requests(manifest)[0], manifest)
        except CallerError:  # the model lacks a layer, for example
            return 0

    def _with_parameters(self) -> TaskBody:
        """Returns the example of the task with the parameters."""
        example = {name: value for name, value in self._spec.body.example().items() if name in required(self._spec.body)}
        try:
            return validate_as(self._spec.body, example | self._parameters, Limits(max_inputs=2**14, max_chars=2**20))
        except BertServeError as error:
            raise SettingsError(f"--parameters does not fit /{self._spec.path}: {error.message}") from error

    def _check_added(self, columns: Any, kind: type[BertServeError]) -> None:
        for name in self._added:
            if name in columns:
                flag = "--warnings-column" if name == self._added[-1] else "--prediction-column"
                raise kind(f"the input already has the column `{name}`, which the output adds; give another name with {flag}.")


def _flag(field: str) -> str:
    return field.replace("_", "-")
