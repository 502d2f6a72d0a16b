"""Reads JSON Lines of inputs with or without correct answers, for `verify --data` and `calibrate`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.export.errors import UsageError
from bertserve.export.input_fields import JsonObject, naming_line, read_input
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.validation.served_graph import validate_body
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.scoring.rows import read_json_lines

_FORMAT = (
    'The file must be JSON Lines: an object per line, such as {"text": "a warm film", "label": "positive"}. Convert CSV to JSON Lines, '
    "with numbers as JSON numbers."
)


@dataclass(frozen=True)
class LabeledRow:
    """A line of data: its number, its JSON object, the input of its task, and the correct answer (gold) as read by the task, or None."""

    line: int | None
    values: JsonObject
    input: Any
    gold: Any

    @property
    def text(self) -> str:
        """Its input as JSON; copies have the same one."""
        return json.dumps(read_input(self.values), sort_keys=True)

    @property
    def kind(self) -> str:
        """Its labels, or whether there is any entity or answer; halves of the data have equal shares of each kind."""
        gold = self.gold[0] if isinstance(self.gold, tuple) else self.gold  # entities come with the words that they consist of
        return repr(sorted(gold)) if isinstance(gold, frozenset) else repr(bool(gold))


def read_data(path: Path, manifest: Manifest) -> list[LabeledRow]:
    """Reads JSON Lines: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Raises:
        UsageError: The file cannot be read, or a line is invalid; the message has its number.
    """
    task, parameters, golds, lines = EXPORT_TASKS[manifest.task], list[JsonObject](), list[Any](), list[LabeledRow]()
    try:
        rows = list(read_json_lines(path, ()))
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error}.") from error
    if not rows:
        raise UsageError(f'`{path}` has no lines; give one JSON object per line, such as {{"inputs": "a text"}}.')
    for row in rows:
        with naming_line(path, row.line):
            if row.error is not None:
                raise ValueError(f"{row.error} {_FORMAT}")
            parameters.append({} if row.values.get("parameters") is None else row.values["parameters"])
            if not isinstance(parameters[-1], dict):
                raise ValueError("`parameters` must be an object.")
            golds.append(task.read_gold(dict(row.values), manifest))
    for row, gold, values in zip(rows, golds, task.data_parameters(parameters, golds), strict=True):
        document = dict(row.values)
        with naming_line(path, row.line):
            inputs = read_input(document)
            if isinstance(inputs, list):
                raise ValueError("`inputs` is a list; give one input per line.")
            [input_] = validate_body(task, {"inputs": inputs, "parameters": values}).task_inputs(manifest)
            lines.append(LabeledRow(row.line, document, input_, gold))
    return lines
