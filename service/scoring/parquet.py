"""Parquet with pyarrow: windows of rows, and a writer of nested predictions."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.service.errors import SettingsError, StartError, install_command
from bertserve.service.scoring.rows import WINDOW_BYTES, Row, Window, Writer
from bertserve.service.tasks.json_text import to_plain

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:
    raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.") from missing

_JSON_TYPES = ("null", "boolean", "integer", "floating", "string", "large_string", "date")


@contextmanager
def _explained(problem: str, remedy: str = "write JSON Lines, because a Parquet column has one type") -> Iterator[None]:
    """Raises errors of pyarrow as `StartError`."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise StartError(f"{problem} ({error}); {remedy}.") from error


def read_parquet(path: Path, inputs: Sequence[str] | None, max_rows: int) -> tuple[Any, Iterator[Window]]:
    """Returns the schema and the windows of a file; rows have the `inputs` among its columns, or by default all, as JSON has them."""
    with _explained(f"the input `{path}` cannot be read as Parquet", "check its format"):
        # INT96 has days and nanoseconds: as 64-bit nanoseconds, times outside 1677 to 2262 would become other times
        file = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
    return file.schema_arrow, _windows(file, [name for name in file.schema_arrow.names if inputs is None or name in inputs], max_rows)


def _windows(file: Any, names: Sequence[str], max_rows: int) -> Iterator[Window]:
    total, position = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)), 0
    rows_of(file.schema_arrow.empty_table(), names)  # checks the types
    with _explained("the input is broken", "write it again"):
        for batch in file.iter_batches(max(1, min(max_rows, WINDOW_BYTES * file.metadata.num_rows // max(total, 1)))):
            table = pa.Table.from_batches([batch])
            yield Window(rows_of(table, names, position), table)
            position += len(table)


def rows_of(table: Any, names: Sequence[str], before: int = 0) -> list[Row]:
    """Returns the rows of a table with some of its columns; `before` rows precede it in the file. A `StartError` names the column."""
    columns = []
    for name in names:
        column = table.column(name)
        is_time = pa.types.is_timestamp(column.type)
        if not is_time and not _is_json(column.type):
            raise SettingsError(
                f"the column `{name}` has the type {column.type}, which JSON lacks; convert or remove it, or write Parquet."
            )
        with _explained(f"the column `{name}` has a value that JSON lacks", "fix it, or write Parquet"):
            columns.append((column.cast(pa.timestamp("us", column.type.tz)) if is_time else column).to_pylist())  # as in Python
    return [
        Row(number, values=dict(zip(names, values, strict=True))) for number, values in enumerate(zip(*columns, strict=True), before + 1)
    ]


def _is_json(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if hasattr(kind, "value_type"):  # of a list or a dictionary
        return _is_json(kind.value_type)
    return any(getattr(pa.types, f"is_{name}")(kind) for name in _JSON_TYPES)


def with_predictions(table: Any, rows: Sequence[Row], names: Sequence[str]) -> Any:
    """Returns a table with columns for predictions, nested, and for warnings."""
    predictions = [row.prediction for row in rows]
    if any(isinstance(prediction, np.ndarray) for prediction in predictions):  # embeddings stay numbers of four bytes
        predictions = [list(value) if isinstance(value, np.ndarray) and value.ndim == 2 else value for value in predictions]
    else:
        predictions = to_plain(predictions)
    with _explained("the predictions have different types"):
        column = pa.array(predictions)
    return table.append_column(names[0], column).append_column(names[1], pa.array([row.warnings for row in rows], pa.list_(pa.string())))


def merged(schemas: Sequence[Any]) -> Any:
    """Returns a schema for tables with several schemas: a window without an entity, for example, does not show the type of entities."""
    with _explained("the predictions have different types"):
        return pa.unify_schemas(schemas, promote_options="permissive")


class ParquetWriter(Writer):
    """Writes Parquet; `schema` is that of the input, or None for texts, and `names` are the columns for predictions and warnings."""

    def __init__(self, schema: Any, columns: Sequence[str], names: Sequence[str]) -> None:
        self._input_schema = pa.schema([(name, pa.string()) for name in columns]) if schema is None else schema
        self._names, self._empty = names, with_predictions(self._input_schema.empty_table(), [], names).schema
        self._written = self._empty

    def write(self, window: Window) -> bytes:
        """Returns the rows that have an answer, as a file."""
        rows = [row for row in window.rows if row.error is None]
        if window.table is None:
            table = pa.Table.from_pylist([dict(row.values) for row in rows], self._input_schema)
        else:
            table = window.table.filter(pa.array([row.error is None for row in window.rows]))
        table = with_predictions(table, rows, self._names)
        self._written = merged([self._written, table.schema])  # an error comes now, and not at the end
        data = io.BytesIO()
        pq.write_table(table, data)
        return data.getvalue()

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """Writes all parts to a file."""
        files = [pq.ParquetFile(part, memory_map=True) for part in parts]
        schema = merged([self._empty, *(file.schema_arrow for file in files)])
        with pq.ParquetWriter(path, schema) as writer:
            for file in files:
                writer.write_table(file.read().cast(schema))
