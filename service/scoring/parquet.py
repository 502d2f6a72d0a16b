"""Parquet with pyarrow: reads row groups in pieces, and writes answers as nested columns.

A Parquet file cannot be continued after a crash, because its index is at the end. Therefore the part is an Arrow stream, to which bytes
are only appended; the complete part is converted to Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

from bertserve.service.errors import BertServeError, InvalidValueError, SettingsError, StartError, install_command
from bertserve.service.scoring.columns import options
from bertserve.service.scoring.row import Place, Row, RowAnswer, Window
from bertserve.service.scoring.text_lines import first_twice
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.filling import FilledText

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:
    raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.") from missing
from bertserve.service.scoring.json_forms import JsonColumn, plain


class ParquetReader:
    """Reads rows of a Parquet file."""

    def __init__(self, path: Path | str, place: Place, *, inputs: Sequence[str], whole: bool = False, filesystem: Any = None) -> None:
        """Opens a file and starts at a place.

        Args:
            path: The file.
            place: The place to start at.
            inputs: Columns that the task reads; rows have their values if the file has these columns.
            whole: Whether rows have the values of all columns, converted to JSON.
            filesystem: The file's file system in pyarrow; None for this machine.

        Raises:
            StartError: It is not a Parquet file.
            SettingsError: An input is neither text nor a list of texts, a column cannot be converted to JSON, or two columns have the same
                name.
        """
        try:
            # INT96 has days and nanoseconds: as 64-bit nanoseconds, times outside 1677 to 2262 would become other times
            self._file = pq.ParquetFile(path, filesystem=filesystem, coerce_int96_timestamp_unit="us")
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"the input `{path}` cannot be read as Parquet: {error}.") from error
        stored = self._file.schema_arrow
        self.schema: Any = pa.schema([field.with_type(plain(field.type)) for field in stored], metadata=stored.metadata)
        self.columns: Sequence[str] = self.schema.names
        self.rows = self._file.metadata.num_rows
        try:
            self._values = self._json_columns(inputs, whole)
        except SettingsError:
            self.close()
            raise
        self._skip, self._row = place.row, 0
        self._tables: Iterator[Any] | None = None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, within both limits; None at the end.

        Raises:
            StartError: The file is broken.
        """
        if self._tables is None:
            self._tables = self._pieces(max_rows, max_bytes)
        try:
            table = next(self._tables, None)
        except (pa.ArrowException, OSError) as error:
            raise StartError(f"the input is broken after row {self._row}: {error}.") from error
        if table is None:
            return None
        first = self._row - table.num_rows
        rows = [Row(first + index, values={}) for index in range(1, table.num_rows + 1)]
        for name, column in self._values.items():
            for row, value in zip(rows, column.values(table.column(name)), strict=True):
                row.values[name] = value
                row.error = value if isinstance(value, InvalidValueError) else row.error
        return Window(rows, Place(self._row, self._row), table)

    def _json_columns(self, inputs: Sequence[str], whole: bool) -> dict[str, JsonColumn]:
        if (twice := first_twice(self.columns)) is not None:
            raise SettingsError(f"the input has the column `{twice[:64]}` twice; give each its own name.")
        for name in inputs:
            if name in self.columns and not _is_text(kind := self.schema.field(name).type):
                raise SettingsError(
                    f"the column `{name}` has the type {kind}, but an input must be a text or a list of texts; convert "
                    "it, or choose another column."
                )
        return {field.name: JsonColumn(field.name, field.type) for field in self.schema if whole or field.name in inputs}

    def _pieces(self, max_rows: int, max_bytes: int) -> Iterator[Any]:
        for group in range(self._file.num_row_groups):
            metadata = self._file.metadata.row_group(group)
            count = metadata.num_rows
            if self._row + count <= self._skip:
                self._row += count
                continue
            # batches and pieces depend only on the row group, so they are the same from any starting place
            batch_rows = max(1, min(max_rows, max_bytes * count // max(metadata.total_byte_size, 1)))
            for batch in self._file.iter_batches(batch_rows, row_groups=[group]):
                table = pa.Table.from_batches([batch]).cast(self.schema)
                piece_rows = max(1, table.num_rows * max_bytes // max(table.nbytes, max_bytes))  # repeated values are larger in memory
                for start in range(0, table.num_rows, piece_rows):
                    piece = table.slice(start, piece_rows)
                    self._row += piece.num_rows
                    if self._row > self._skip:
                        yield piece


def _is_text(kind: Any) -> bool:
    """Returns whether a type is text, a list of texts or null."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_list_view(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


class ParquetWriter:
    """Converts rows and answers to an Arrow stream, and the stream to Parquet."""

    head = b""  # `write` returns the schema with the first window, because it depends on this window

    def __init__(self, schema: Any, answer_types: Sequence[Any], prediction: str, warnings: str, *, known: Path | None) -> None:
        """Creates it.

        Args:
            schema: Schema of the input's columns.
            answer_types: Possible types of an answer; the column has the first type that fits all answers of the first window.
            prediction: Name of the column for predictions.
            warnings: Name of the column for warnings.
            known: The file of the stream, if it has rows already.
        """
        self._input, self._candidates, self._names = schema, answer_types, (prediction, warnings)
        self._schema: Any = None
        if known is not None:
            with pa.OSFile(str(known)) as file, pa.ipc.open_stream(file) as stream:
                self._schema = stream.schema

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the rows that have an answer as messages of the stream, and the errors of rows that cannot be written, by index."""
        indices = [index for index, answer in enumerate(answers) if answer.error is None]
        head = b""
        if self._schema is None and indices:
            self._schema = self._decide([answers[index].prediction for index in indices])
            head = self._schema.serialize().to_pybytes()
        if not indices:
            return b"", {}
        kind = self._schema.field(self._names[0]).type
        errors: dict[int, BertServeError] = {
            index: InvalidValueError(
                "the prediction has another type than those of the first rows, {kind}, and a Parquet column has one "
                "type; write JSON Lines.",
                kind=kind,
            )
            for index in indices
            if not _fits(kind, answers[index].prediction)
        }
        indices = [index for index in indices if index not in errors]
        table = window.table if window.table is not None else pa.Table.from_pylist([dict(row.values) for row in window.rows], self._input)
        columns = table.take(pa.array(indices, pa.int64())).columns
        predictions = pa.array([_listed(answers[index].prediction) for index in indices], kind)
        warnings = pa.array([list(answers[index].warnings) for index in indices], pa.list_(pa.string()))
        whole = pa.table([*columns, predictions, warnings], self._schema).combine_chunks()
        return b"".join([head, *(batch.serialize().to_pybytes() for batch in whole.to_batches())]), errors

    def _decide(self, predictions: Sequence[Any]) -> Any:
        kinds = [kind for kind in self._candidates if all(_fits(kind, prediction) for prediction in predictions)]
        if not kinds:
            raise StartError("the predictions of the first rows have different types, and a Parquet column has one type; write JSON Lines.")
        added = [
            pa.field(self._names[0], _narrowed(kinds[0], predictions[0] if predictions else None)),
            pa.field(self._names[1], pa.list_(pa.string())),
        ]
        return pa.schema([*self._input, *added], metadata=self._input.metadata)

    def empty(self) -> Any:
        """Returns the table of an output without answers."""
        return self._decide([]).empty_table()

    def finish(self, part: Path, output: Path) -> None:
        """Writes the Parquet file from a complete part."""
        if part.stat().st_size == 0:
            pq.write_table(self.empty(), output)
            return
        with pa.OSFile(str(part)) as source, pa.ipc.open_stream(source) as stream, pq.ParquetWriter(output, stream.schema) as writer:
            for batch in stream:
                writer.write_batch(batch)


def answer_types(spec: TaskSpec) -> list[Any]:
    """Returns the Arrow types of an answer of a task, likely ones first."""
    # first without optional fields, which would be empty in each row; then with them
    answers = [_arrow(option, whole) for whole in (False, True) for option in options(spec.answer)]
    # for a body whose answer is always a list, each row's answer is an item of it
    items = [answer.value_type for answer in answers if pa.types.is_list(answer)]
    kinds = items if spec.body.always_list else [*answers, *items]
    return [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]


def _arrow(annotation: Any, whole: bool) -> Any:
    kind = next(options(annotation))
    if get_origin(kind) in (list, tuple):  # a tuple, such as a pair of offsets, has items of one type
        return pa.list_(_arrow(get_args(kind)[0], whole))
    if not (is_typeddict(kind) or issubclass(kind, BaseModel)):
        return {str: pa.string(), float: pa.float64(), int: pa.int64(), bool: pa.bool_()}[kind]
    hints = get_type_hints(kind, include_extras=True)  # for a pydantic model these include fields of BaseModel itself
    required = {name for name in getattr(kind, "__required_keys__", ()) if get_origin(hints[name]) is not NotRequired}
    names = [name for name in hints if whole or name in required] if is_typeddict(kind) else kind.model_fields
    return pa.struct([pa.field(name, _arrow(hints[name], whole)) for name in names])


def _fits(kind: Any, value: Any) -> bool:
    """Returns whether a value has a type; None has every type."""
    if value is None:
        return True
    if pa.types.is_list(kind):
        if hasattr(value, "ndim"):
            deep = kind.value_type
            for _ in range(value.ndim - 1):
                deep = deep.value_type if pa.types.is_list(deep) else None
            return deep is not None and pa.types.is_floating(deep)
        return isinstance(value, list | tuple) and all(_fits(kind.value_type, item) for item in value)
    if pa.types.is_struct(kind):
        names = {field.name for field in kind}
        return isinstance(value, dict) and value.keys() <= names and all(_fits(kind.field(name).type, item) for name, item in value.items())
    if pa.types.is_floating(kind):
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, {pa.string(): str | FilledText, pa.int64(): int, pa.bool_(): bool}[kind])


def _narrowed(kind: Any, value: Any) -> Any:
    """Returns the type with numbers of four bytes if the value is an array of such numbers."""
    if pa.types.is_list(kind) and hasattr(value, "ndim"):
        return pa.list_(_narrowed(kind.value_type, value))
    return pa.float32() if pa.types.is_floating(kind) and hasattr(value, "ndim") else kind


def _listed(value: Any) -> Any:
    """Returns a value as Arrow accepts it: with lists instead of arrays and strings instead of filled texts, at any depth."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, FilledText):
        return str(value)
    return value.tolist() if hasattr(value, "ndim") else value


def text_schema(columns: Sequence[str]) -> Any:
    """Returns a schema with only text columns."""
    return pa.schema([pa.field(name, pa.string()) for name in columns])
