"""Reads a user's data: JSON Lines, one request per line, with or without the correct answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import INPUT_KEYS, Document, read_input
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import catalog, multiple_choice
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.reading import read_as

MAX_CHARS = 10**8  # of a user's text


@dataclass(frozen=True)
class Line:
    """One line of the data.

    Attributes:
        number: Its number in the file, from 1.
        request: A request of the service's task.
        gold: The correct answer as read by the task, or None.
        ignored: Keys of the line that are neither an input nor a correct answer of the task.
    """

    number: int
    request: Any
    gold: Any
    ignored: tuple[str, ...] = ()


def read_lines(path: Path, task: str, config: ModelConfig) -> list[Line]:
    """Reads JSONL: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Empty lines are skipped.

    Raises:
        DataError: The file cannot be read, or a line is invalid; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error
    documents = [(number, _parse_line(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not documents:
        raise DataError(f"`{path}` has no lines; give one JSON object per line, such as {json.dumps({'inputs': 'a text'})}.")
    record = TASKS[task]
    parameters = [_parameters(path, number, document) for number, document in documents]
    golds = [
        None if record.read_gold is None else _on_line(path, number, record.read_gold, document, config) for number, document in documents
    ]
    known_keys = INPUT_KEYS.union(record.gold_keys)
    return [
        Line(
            number,
            _on_line(path, number, _request, task, document, line_parameters, config),
            gold,
            tuple(key for key in document if key not in known_keys),
        )
        for (number, document), line_parameters, gold in zip(documents, record.data_parameters(parameters, golds), golds, strict=True)
    ]


def _on_line(path: Path, number: int, reader: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that reads a line; errors get the number of the line."""
    try:
        return reader(*arguments)
    except (BertServeError, ValueError) as error:
        raise DataError(f"`{path}` line {number}: {error}") from error


def _parse_line(path: Path, number: int, line: str) -> Document:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"`{path}` line {number} is not JSON: {error}; give one JSON object per line, not CSV.") from error
    if not isinstance(document, dict):
        raise DataError(f"`{path}` line {number} is not a JSON object; give one such as {json.dumps({'inputs': 'a text'})}.")
    return document


def _parameters(path: Path, number: int, document: Document) -> Document:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"`{path}` line {number}: `parameters` must be an object.")
    return parameters


def _request(task: str, document: Document, parameters: Document, config: ModelConfig) -> Any:
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input per line.")
    (request,) = read_request(task, {"inputs": inputs, "parameters": parameters}).requests(config)
    return request


def read_request(task: str, document: Mapping[str, Any]) -> TaskBody:
    """Returns a body as the service reads it, without a limit on its length.

    Raises:
        CallerError: It is not a valid body of the task.
    """
    limits = Limits(max_inputs=multiple_choice.MAX_CHOICES, max_chars=MAX_CHARS)
    return read_as(catalog.TASKS[task].body, json.dumps(document).encode(), limits)
