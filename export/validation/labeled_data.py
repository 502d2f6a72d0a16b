"""Reads JSON Lines of inputs with or without correct answers, for `verify --data` and `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertserve.export.errors import UsageError
from bertserve.export.input_fields import Document, read_input
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.validation.served_graph import read_body
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError
from bertserve.service.scoring.rows import Row, read_json_lines

_FORMAT = (
    'The file must be JSON Lines: an object per line, such as {"text": "a warm film", "label": "positive"}. Convert CSV to JSON Lines, '
    "with numbers as JSON numbers."
)


def read_data(path: Path, manifest: Manifest) -> tuple[list[Row], list[Any]]:
    """Reads JSON Lines: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Returns:
        The rows with their inputs, and the correct answer of each as read by the task, or None.

    Raises:
        UsageError: The file cannot be read, or a line is invalid; the message has its number.
    """
    task = EXPORT_TASKS[manifest.task]

    def on_line(row: Row, read: Callable[..., Any], *arguments: Any) -> Any:
        if row.error is not None:
            raise UsageError(f"`{path}` line {row.line}: {row.error} {_FORMAT}")
        try:
            return read(*arguments)
        except (BertServeError, ValueError) as error:
            raise UsageError(f"`{path}` line {row.line}: {error}") from error

    try:
        rows = list(read_json_lines(path, ()))
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error}.") from error
    if not rows:
        raise UsageError(f'`{path}` has no lines; give one JSON object per line, such as {{"inputs": "a text"}}.')

    def read_parameters(row: Row) -> Document:
        parameters = row.values.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise ValueError("`parameters` must be an object.")
        return parameters

    def read_row(row: Row, parameters: Document) -> Any:
        inputs = read_input(dict(row.values))
        if isinstance(inputs, list):
            raise ValueError("`inputs` is a list; give one input per line.")
        [input_] = read_body(task, {"inputs": inputs, "parameters": parameters}).task_inputs(manifest)
        return input_

    parameters = [on_line(row, read_parameters, row) for row in rows]
    golds = [on_line(row, task.read_gold, row.values, manifest) for row in rows]
    for row, values in zip(rows, task.data_parameters(parameters, golds), strict=True):
        row.input = on_line(row, read_row, row, values)
    return rows, golds
