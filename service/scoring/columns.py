"""Columns: which columns of a row are the inputs of a task, and the request of a row. It is derived from the list of tasks."""

from __future__ import annotations

import csv
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Union, get_args, get_origin

from pydantic import BaseModel

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError, CallerError, InvalidValueError, Sent, SettingsError, did_you_mean
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS, tasks_of
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.wire.reading import parse_json, validate_as
from bertserve.service.wire.unknown_fields import listed, required

TEXT = "text"


class InputField(NamedTuple):
    """An input of a task: whether it is needed, and whether it is a list of texts, which is written as JSON in text files."""

    needed: bool
    is_list: bool


def input_fields(spec: TaskSpec) -> dict[str, InputField]:
    """Returns a task's inputs by name: keys of objects in `inputs`, `text` if an input can be a text, or the fields without `inputs`."""
    keys = required(spec.body)
    if keys != ["inputs"]:
        return {name: InputField(True, list in _kinds(spec.body.model_fields[name].annotation)) for name in keys}
    kinds = _kinds(spec.body.model_fields["inputs"].annotation)
    fields = {TEXT: InputField(True, False)} if str in kinds else {}
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields |= {name: InputField(info.is_required(), list in _kinds(info.annotation)) for name, info in kind.model_fields.items()}
    return fields


def described_inputs() -> dict[str, str]:
    """Returns the help text for the column of each input of a task, by the input's name."""
    paths: dict[str, list[str]] = {}
    lists: set[str] = set()
    for spec in TASKS.values():
        for name, info in input_fields(spec).items():
            paths.setdefault(name, []).append(f"/{spec.path}")
            lists |= {name} if info.is_list else set()
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


@dataclass(frozen=True, slots=True)
class RowTask:
    """What to do with each row.

    Attributes:
        task: Name or path of the task; None for the model's own, or the one that parameters or columns identify.
        columns: Field of the task -> column; if empty, columns are found by the names of the fields.
        parameters: Parameters of each request, in the format of the endpoint.
        empty: The handling of rows with an empty text.
        names: Names of the columns that the output adds, for predictions and warnings.
    """

    task: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    empty: Literal["warn", "reject"] = "warn"
    names: Sequence[str] = ("prediction", "warnings")

    def name(self, tasks: Sequence[str]) -> str:
        """Returns the name of the task, which is one of a model's tasks; the first one is its own.

        Raises:
            SettingsError: The model does not support the task.
        """
        if self.task is not None:
            name = next((name for name, spec in TASKS.items() if self.task in (name, spec.path)), self.task)
            if name not in tasks:
                raise SettingsError(f"--task is `{self.task}`, but the model supports {', '.join(tasks)}.")
            return name
        derivations = ((name, TASKS[name].derivation) for name in tasks[1:])
        signs = {*self.parameters, *self.columns}
        return next((name for name, derivation in derivations if derivation and derivation.discriminator[-1] in signs), tasks[0])


class Columns:
    """Builds requests from rows, and validates them like the endpoint.

    Attributes:
        name: Name of the task.
        spec: The task.
        by_field: Field of the task -> column.
        answer_bytes: Maximum bytes of an answer; 0 if answers are small, or if each row will be rejected.
    """

    def __init__(self, task: RowTask, manifest: Manifest, limits: Limits) -> None:
        """Creates it for a model and the limits of a request.

        Raises:
            SettingsError: A field does not belong to the task, a required field has no column, or the endpoint refuses the parameters.
        """
        self.name = task.name(tasks_of(manifest))
        self.spec, self._manifest, self._limits, self._empty = TASKS[self.name], manifest, limits, task.empty
        fields, named, parameters = input_fields(self.spec), task.columns, task.parameters
        if unknown := [name for name in named if name not in fields]:
            raise SettingsError(f"--{_flag(unknown[0])} is for other tasks; {self.name} has the inputs {listed(list(fields))}.")
        if named and (missing := [name for name, info in fields.items() if info.needed and name not in named]):
            raise SettingsError(
                f"--{_flag(missing[0])} is missing: {self.name} needs it, and columns are given only for {listed(list(named))}."
            )
        self.by_field = dict(named) or {name: name for name in fields}
        self._fields = [(name, column, fields[name], fields[name].needed or bool(named)) for name, column in self.by_field.items()]
        if foreign := [name for name in parameters if name in ("model", *required(self.spec.body))]:
            raise SettingsError(f"--parameters has `{foreign[0]}`, which is not a parameter of /{self.spec.path}; remove it.")
        has_object = parameters and self.spec.body.parameters_type.model_fields
        self._parameters = {"parameters": dict(parameters)} if has_object else dict(parameters)
        self.answer_bytes = self._answer_bytes()

    def _answer_bytes(self) -> int:
        example = {name: value for name, value in self.spec.body.example().items() if name in required(self.spec.body)}
        try:
            body = validate_as(self.spec.body, example | self._parameters, Limits(max_inputs=2**14, max_chars=2**20))
        except BertServeError as error:
            raise SettingsError(f"--parameters does not fit /{self.spec.path}: {error.message}") from error
        try:
            return 0 if self.spec.answer_bytes is None else self.spec.answer_bytes(body.requests(self._manifest)[0], self._manifest)
        except CallerError:  # the model lacks a layer, for example
            return 0

    def check(self, columns: Sequence[str], header: str = "") -> None:
        """Checks the columns of a file; `header` is its first line, if it is CSV or TSV.

        Raises:
            SettingsError: A required column is missing.
        """
        for name, column, _, must_exist in self._fields:
            if must_exist and column not in columns:
                hint = _delimiter_hint(column, header) or did_you_mean(column, columns)
                raise SettingsError(
                    f"the input has no column `{column}`; {hint or 'name another one.'} It has {listed(columns[:20])}; choose one with --{_flag(name)}."
                )

    def request(self, values: Mapping[str, Any]) -> Any:
        """Returns the request of a row, given its values by column.

        Raises:
            CallerError: The endpoint would refuse it, or a column that is required or that a flag names is missing.
        """
        inputs: dict[str, Any] = {}
        for name, column, info, must_exist in self._fields:
            value = values.get(column)
            if must_exist and column not in values:
                raise InvalidValueError(
                    "the row has no column `{column}`; it has {columns}.", column=column, columns=Sent(listed(list(values)[:20]))
                )
            if self._empty == "reject" and info.needed and isinstance(value, str) and not value.strip():
                raise InvalidValueError("the column `{column}` is empty, and --empty is `reject`.", column=column)
            if info.is_list and isinstance(value, str):
                value = _list(column, value)
            elif isinstance(value, list) and not info.is_list:  # the endpoint reads it as several inputs
                raise InvalidValueError("the column `{column}` must be a text, and it is a list; write a row for each text.", column=column)
            if info.needed or value not in (None, ""):
                inputs[name] = value
        if required(self.spec.body) == ["inputs"]:
            inputs = {"inputs": inputs[TEXT] if list(inputs) == [TEXT] else inputs}
        (request,) = validate_as(self.spec.body, inputs | self._parameters, self._limits).requests(self._manifest)
        return request


def _list(column: str, value: str) -> Any:
    with suppress(BertServeError):  # the endpoint's error would quote the value
        if isinstance(texts := parse_json(value.encode()), list):
            return texts
    raise InvalidValueError('the column `{column}` must be a JSON list of texts, such as ["a", "b"].', column=column)


def _delimiter_hint(column: str, header: str) -> str:
    """Returns a hint about the delimiter with which a header has a column; empty if there is none."""
    for delimiter, remedy in (
        (";", "semicolons; convert them to commas."),
        ("|", "`|`; convert it to commas."),
        ("\t", "tabs; give --input-format tsv."),
        (",", "commas; give --input-format csv."),
    ):
        names = next(csv.reader([header], delimiter=delimiter), [])
        if column in names and len(names) > 1:
            return f"its columns are separated by {remedy}"
    return ""


def _flag(name: str) -> str:
    return name.replace("_", "-")


def read_parameters(text: str) -> dict[str, Any]:
    """Reads the parameters of each request from JSON.

    Raises:
        SettingsError: It is not a JSON object.
    """
    with suppress(BertServeError):
        if isinstance(value := parse_json(text.encode()), dict):
            return value
    raise SettingsError("--parameters is not a JSON object; give one such as '{\"top_k\": 1}'.")
