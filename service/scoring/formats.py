"""Formats: chooses the reader and the writer from a file name or a flag."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bertserve.service.errors import BertServeError, SettingsError, StartError
from bertserve.service.scoring.row import Place, RowAnswer, Window
from bertserve.service.scoring.text_lines import DELIMITERS, DelimitedReader, DelimitedWriter, JsonLinesReader, JsonLinesWriter
from bertserve.service.tasks.catalog import TASKS

STREAM = Path("-")
JSONL, PARQUET = "jsonl", "parquet"
SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": "csv", ".tsv": "tsv", ".parquet": PARQUET}


class Reader(Protocol):
    """Reads windows of rows."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns of all rows, or None if rows may differ."""
        ...

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, or None at the end."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class Writer(Protocol):
    """Converts rows and answers to bytes; `head` has the bytes before the first row."""

    head: bytes

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the rows that have an answer as bytes, and the errors of rows that cannot be written, by index."""
        ...


def format_of(path: Path, flag_value: str | None, flag: str) -> str:
    """Returns the format from a flag, or otherwise from a file's suffix.

    Raises:
        SettingsError: Neither has a format, or Parquet is requested for a stream.
    """
    kind = flag_value or SUFFIXES.get(path.suffix.lower())
    if kind is None:
        what = "it is a stream" if path == STREAM else f"`{path.name}` ends with none of {', '.join(SUFFIXES)}"
        raise SettingsError(f"{flag} is missing: {what}; give one of jsonl, csv, tsv and parquet.")
    if kind == PARQUET and path == STREAM:
        raise SettingsError("Parquet needs a file, because its index is at the end; give a path instead of `-`, or another format.")
    return kind


def open_reader(path: Path, kind: str, place: Place, *, max_bytes: int, inputs: Sequence[str], whole: bool) -> Reader:
    """Opens the input and starts at a place.

    Args:
        path: The input.
        kind: Its format.
        place: The place to start at.
        max_bytes: Maximum bytes of a line.
        inputs: Columns that the task reads.
        whole: Whether the values of other Parquet columns are needed too; other formats always have them.

    Raises:
        StartError: It cannot be read, does not have the format, or has an unsupported column.
    """
    if kind == PARQUET:
        from bertserve.service.scoring.parquet import ParquetReader

        return ParquetReader(path, place, inputs=inputs, whole=whole)
    try:
        file: BinaryIO = open(0, "rb", closefd=False) if path == STREAM else path.open("rb")  # noqa: SIM115 - it stays open until the end
    except OSError as error:
        raise StartError(f"the input `{path}` cannot be read ({error.strerror}).") from error
    if kind == JSONL:
        return JsonLinesReader(file, place, max_bytes=max_bytes)
    try:
        return DelimitedReader(file, place, delimiter=DELIMITERS[kind], max_bytes=max_bytes)
    except StartError:
        file.close()
        raise


def make_writer(kind: str, reader: Reader, task: str, names: Sequence[str], *, known: Path | None, json_cells: bool = False) -> Writer:
    """Returns the writer of the output.

    Args:
        kind: Its format.
        reader: The reader of the input.
        task: The task.
        names: Names of the columns for predictions and, as the last one, for warnings.
        json_cells: Whether CSV and TSV have warnings as JSON.
        known: The part of an earlier run, if it has rows.

    Raises:
        SettingsError: The format has fixed columns, but the input does not.
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
        return parquet.ParquetWriter(schema, parquet.answer_types(TASKS[task]), *names, known=known)
    return DelimitedWriter(reader.columns, names, delimiter=DELIMITERS[kind], json_cells=json_cells)


def total_size(path: Path, reader: Reader) -> int | None:
    """Returns the size of the input in the unit of its rows' sizes; None if unknown."""
    rows: Any = getattr(reader, "rows", None)
    return rows if rows is not None else None if path == STREAM else os.stat(path).st_size
