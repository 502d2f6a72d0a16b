"""Formats: which reader and which writer a name or a flag asks for."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NotRequired, Protocol, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

from bertserve.service.errors import BertServeError, SettingsError, StartError
from bertserve.service.scoring.row import Answer, Place, Window
from bertserve.service.scoring.text_lines import DELIMITERS, DelimitedReader, DelimitedWriter, JsonLinesReader, JsonLinesWriter
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import TaskSpec

STREAM = Path("-")
JSONL, PARQUET = "jsonl", "parquet"
SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": "csv", ".tsv": "tsv", ".parquet": PARQUET}


class Reader(Protocol):
    """Reads windows of rows."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that all rows have, or None where rows may differ."""
        ...

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, or None at the end."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class Writer(Protocol):
    """Makes bytes of rows and answers."""

    def begin(self) -> bytes:
        """Returns what stands before the first row."""
        ...

    def write(self, window: Window, answers: Sequence[Answer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the rows that have an answer, and the errors of rows that cannot be written, by their index."""
        ...


def format_of(path: Path, given: str | None, flag: str) -> str:
    """Returns the format that a flag names, or else a file's suffix.

    Raises:
        SettingsError: Neither says, or Parquet is asked for on a stream.
    """
    found = given or SUFFIXES.get(path.suffix.lower())
    if found is None:
        what = "it is a stream" if path == STREAM else f"`{path.name}` ends with none of {', '.join(SUFFIXES)}"
        raise SettingsError(f"{flag} is missing: {what}; give one of jsonl, csv, tsv and parquet.")
    if found == PARQUET and path == STREAM:
        raise SettingsError("Parquet needs a file, because its index is at the end; give a path instead of `-`, or another format.")
    return found


def open_reader(path: Path, kind: str, place: Place, *, max_bytes: int, inputs: Sequence[str], whole: bool) -> Reader:
    """Opens the input at a place.

    Args:
        path: The input.
        kind: Its format.
        place: Where to begin.
        max_bytes: Of a line.
        inputs: Columns that the task reads.
        whole: Whether the values of other columns of Parquet are wanted too; those of other formats always come.

    Raises:
        StartError: It cannot be read, is not of the format, or has a column that cannot be used.
    """
    if kind == PARQUET:
        from bertserve.service.scoring.parquet import ParquetReader

        return ParquetReader(path, place, inputs=inputs, whole=whole)
    try:
        file: BinaryIO = open(0, "rb", closefd=False) if path == STREAM else path.open("rb")  # noqa: SIM115 - it is read until the process ends
    except OSError as error:
        raise StartError(f"the input `{path}` cannot be read ({error.strerror}).") from error
    if kind == JSONL:
        return JsonLinesReader(file, place, max_bytes=max_bytes)
    try:
        return DelimitedReader(file, place, delimiter=DELIMITERS[kind], max_bytes=max_bytes)
    except StartError:
        file.close()
        raise


def make_writer(kind: str, reader: Reader, task: str, names: Sequence[str], *, known: bytes, json_cells: bool = False) -> Writer:
    """Returns what makes the output.

    Args:
        kind: Its format.
        reader: Of the input.
        task: The task.
        names: Of the columns for predictions and, at the end, warnings.
        json_cells: Whether CSV and TSV have warnings as JSON.
        known: The beginning of what an earlier run wrote.

    Raises:
        SettingsError: The format has fixed columns, and the input has none.
    """
    if kind == JSONL:
        prediction, warnings = names
        return JsonLinesWriter(prediction, warnings)
    if reader.columns is None:
        raise SettingsError(
            f"JSON Lines cannot be written as {kind}, because their lines can have different fields, and {kind} "
            "has the same columns in each row; write JSON Lines."
        )
    if kind == PARQUET:
        from bertserve.service.scoring import parquet

        schema = reader.schema if isinstance(reader, parquet.ParquetReader) else parquet.text_schema(reader.columns)
        return parquet.ParquetWriter(schema, parquet.answer_types(answer_forms(TASKS[task])), *names, known=known)
    return DelimitedWriter(reader.columns, names, delimiter=DELIMITERS[kind], json_cells=json_cells)


def total_size(path: Path, reader: Reader) -> int | None:
    """Returns the size of the input in what its rows count for, or None where it is unknown."""
    rows: Any = getattr(reader, "rows", None)
    return rows if rows is not None else None if path == STREAM else os.stat(path).st_size


def answer_forms(spec: TaskSpec) -> list[Any]:
    """Returns the forms, likely ones first: a scalar type, a list with the form of its items, or a mapping of names to forms."""
    # without what only some requests ask for, which would be an empty field of each row; then with it
    answers = [_form(option, whole) for whole in (False, True) for option in _options(spec.answer)]
    # of a body that is answered like a list of one, each answer is that of a list
    items = [answer[0] for answer in answers if isinstance(answer, list)]
    forms = items if spec.body.always_list else [*answers, *items]
    return [form for index, form in enumerate(forms) if form not in forms[:index]]


def _options(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, NotRequired):
        yield from _options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            if option is not types.NoneType:
                yield from _options(option)
    else:
        yield annotation


def _form(annotation: Any, whole: bool) -> Any:
    kind = next(_options(annotation))
    if get_origin(kind) in (list, tuple):  # a tuple, such as a pair of offsets, has items of one type
        return [_form(get_args(kind)[0], whole)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        # `get_type_hints` also has what pydantic keeps for itself
        hints = get_type_hints(kind, include_extras=True)
        return {name: _form(hints[name], whole) for name in kind.model_fields}
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = {name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired}
        return {name: _form(hint, whole) for name, hint in hints.items() if whole or name in required}
    return kind
