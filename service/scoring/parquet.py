"""Parquet with pyarrow: a reader of windows, and a writer of nested predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertserve.service.errors import InvalidValueError, SettingsError, StartError, install_command
from bertserve.service.scoring.rows import WINDOW_BYTES, Reader, Row, RowAnswer, Window, Writer
from bertserve.service.wire.json_text import to_plain

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:
    raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.") from missing


class ParquetReader(Reader):
    """Reads Parquet. A window is within a row group."""

    def __init__(self, path: Path, inputs: Sequence[str], *, whole: bool) -> None:
        """Opens a file; rows have the values of the `inputs` among its columns, and if `whole` of all columns.

        Raises:
            StartError: It is not a Parquet file.
            SettingsError: A column cannot be read as JSON.
        """
        try:
            # INT96 has days and nanoseconds: as 64-bit nanoseconds, times outside 1677 to 2262 would become other times
            self._parquet = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"the input `{path}` cannot be read as Parquet: {error}.") from error
        self.schema: Any = self._parquet.schema_arrow
        self.columns, self.total = self.schema.names, self._parquet.metadata.num_rows
        self._read = {field.name: field.type for field in self.schema if whole or field.name in inputs}
        for name, kind in self._read.items():
            _json_type(name, kind)

    def windows(self, max_rows: int) -> Iterator[Window]:
        """Yields the rows.

        Raises:
            StartError: The file is broken, or a value cannot be read as JSON.
        """
        position = 0
        try:
            for group in range(self._parquet.num_row_groups):
                size = self._parquet.metadata.row_group(group)
                rows = max(1, min(max_rows, WINDOW_BYTES * size.num_rows // max(size.total_byte_size, 1)))
                for batch in self._parquet.iter_batches(rows, row_groups=[group]):
                    step = max(1, batch.num_rows * WINDOW_BYTES // max(batch.nbytes, WINDOW_BYTES))  # repeated values are larger in memory
                    for start in range(0, batch.num_rows, step):
                        table = pa.Table.from_batches([batch.slice(start, step)])
                        position += table.num_rows
                        yield Window(rows_of(table, list(self._read), position - table.num_rows), position, table)
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"the input is broken after row {position}: {error}.") from error


def rows_of(table: Any, names: Sequence[str], before: int = 0) -> list[Row]:
    """Returns the rows of a table with some of its columns; `before` rows precede it in the file.

    Raises:
        StartError: A value cannot be read as JSON.
        SettingsError: A column cannot be read as JSON.
    """
    columns = [_values(name, table.column(name)) for name in names]
    rows = [Row(before + index, dict(zip(names, values, strict=True))) for index, values in enumerate(zip(*columns, strict=True), 1)]
    for row in rows:
        row.error = next((value for value in row.values.values() if isinstance(value, InvalidValueError)), None)
    return rows


def _values(name: str, column: Any) -> list[Any]:
    """Returns the values of a column as JSON has them; instead of a text that is not UTF-8, an error."""
    try:
        values: list[Any] = column.cast(_json_type(name, column.type)).to_pylist()
    except UnicodeDecodeError:
        if len(column) == 1:
            return [InvalidValueError("the column `{column}` is not UTF-8; fix the text.", column=name)]
        half = len(column) // 2
        return [*_values(name, column.slice(0, half)), *_values(name, column.slice(half))]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise StartError(
            f"the column `{name}` has a value that JSON and CSV cannot represent: {error}; fix it, or write Parquet."
        ) from error
    return values


def _json_type(name: str, kind: Any) -> Any:
    """Returns the type as which the values of a column are JSON.

    Raises:
        SettingsError: There is none, as for bytes, decimals and maps.
    """
    types = pa.types
    if types.is_dictionary(kind):
        return _json_type(name, kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_json_type(name, kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_json_type(name, field.type)) for field in kind])
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)  # as in Python
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if is_text or types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_date(kind):
        return kind
    raise SettingsError(f"the column `{name}` has the type {kind}, which JSON and CSV do not have; convert or remove it, or write Parquet.")


def with_predictions(table: Any, answers: Sequence[RowAnswer], names: Sequence[str]) -> Any:
    """Returns a table with columns for predictions, nested, and for warnings.

    Raises:
        StartError: The predictions have different types.
    """
    predictions = [answer.prediction for answer in answers]
    if not any(hasattr(prediction, "ndim") for prediction in predictions):
        predictions = to_plain(predictions)
    try:
        column = pa.array([list(value) if getattr(value, "ndim", 1) == 2 else value for value in predictions])
    except pa.ArrowException as error:
        raise _different_types(error) from error
    warnings = pa.array([answer.warnings for answer in answers], pa.list_(pa.string()))
    return table.append_column(names[0], column).append_column(names[1], warnings)


def merged(schemas: Sequence[Any]) -> Any:
    """Returns a schema for tables with several schemas: a window without an entity, for example, does not show the type of entities.

    Raises:
        StartError: The predictions have different types.
    """
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise _different_types(error) from error


def _different_types(error: Exception) -> StartError:
    return StartError(f"the predictions have different types ({error}), and a Parquet column has one type; write JSON Lines.")


class ParquetWriter(Writer):
    """Writes rows and answers as Arrow streams, and joins these to a Parquet file."""

    def __init__(self, reader: Reader, names: Sequence[str]) -> None:
        """Takes the reader of the input, and the names of the columns for predictions and warnings."""
        self._schema = getattr(reader, "schema", None) or pa.schema([(name, pa.string()) for name in reader.columns or ()])
        self._names, self._merged = names, self._schema

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> bytes:
        """Returns the rows that have an answer as a stream."""
        indices = [index for index, answer in enumerate(answers) if answer.error is None]
        table = window.table
        if table is None:
            table = pa.Table.from_pylist([dict(row.values) for row in window.rows], self._schema)
        table = with_predictions(table.take(indices), [answers[index] for index in indices], self._names)
        self._merged = merged([self._merged, table.schema])  # an error comes now, and not at the end
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        data: bytes = stream.getvalue().to_pybytes()
        return data

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Writes all parts to a Parquet file."""
        schema = merged([with_predictions(self._schema.empty_table(), [], self._names).schema, *(_table(part).schema for part in parts)])
        with pq.ParquetWriter(path, schema) as writer:
            for part in parts:
                writer.write_table(_table(part).cast(schema))


def _table(part: Path) -> Any:
    with pa.memory_map(str(part)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()
