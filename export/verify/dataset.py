"""Reads a user's data for `bert-export verify --data`: JSONL, one request a line, with or without the right answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.input_fields import Document, read_input
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import choose
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.tasks.body import Limits
from bertserve.service.wire.reading import read_body

MAX_CHARS = 10**8


@dataclass(frozen=True)
class Line:
    """One line of the data.

    Attributes:
        number: Its number in the file, from 1.
        request: A request of the service's task.
        gold: The right answer, as the task reads it, or None.
    """

    number: int
    request: Any
    gold: Any


def read_dataset(path: Path, task: str, config: ModelConfig) -> list[Line]:
    """Reads JSONL: `{"inputs": ..., "parameters"?: ...}` as the service takes it, or the fields of one input, and the right answer.

    Args:
        path: The file; empty lines are skipped.
        task: Hugging Face name of the bundle's task.
        config: The bundle's labels, and for embeddings how its vectors are computed.

    Raises:
        DataError: The file cannot be read, or a line is not understood; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error
    documents = [(number, _parse_line(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not documents:
        raise DataError(f"`{path}` holds no line; give a JSON object a line, such as {json.dumps({'inputs': 'a text'})}.")
    record = TASKS[task]
    parameters = [_parameters(path, number, document) for number, document in documents]
    golds = [
        None if record.read_gold is None else _on_line(path, number, record.read_gold, document, config) for number, document in documents
    ]
    return [
        Line(number, _on_line(path, number, _request, task, document, own, config), gold)
        for (number, document), own, gold in zip(documents, record.data_parameters(parameters, golds), golds, strict=True)
    ]


def _on_line(path: Path, number: int, read: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function reads of a line, whose number an error gets."""
    try:
        return read(*arguments)
    except (BertServeError, ValueError) as error:
        raise DataError(f"`{path}` line {number}: {error}") from error


def _parse_line(path: Path, number: int, line: str) -> Document:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"`{path}` line {number} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise DataError(f"`{path}` line {number} is no JSON object; give one such as {json.dumps({'inputs': 'a text'})}.")
    return document


def _parameters(path: Path, number: int, document: Document) -> Document:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"`{path}` line {number}: `parameters` must be an object.")
    return parameters


def _request(task: str, document: Document, parameters: Document, config: ModelConfig) -> Any:
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input a line.")
    raw = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    (request,) = read_body(task, raw, Limits(max_inputs=choose.MAX_CHOICES, max_chars=MAX_CHARS)).requests(config)
    return request
