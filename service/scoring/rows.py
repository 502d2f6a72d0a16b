"""Reads rows of JSON Lines, CSV, TSV and Parquet in blocks, and writes them with predictions."""

import csv
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bertserve.service.body.json_text import to_json, to_plain
from bertserve.service.errors import BertServeError, InvalidValueError, SettingsError, StartError

with suppress(ImportError):  # the extra `parquet`
    import pyarrow as pa
    import pyarrow.parquet as pq

# Maximum bytes of a block's rows in the file, so that long rows need no more memory than short ones.
BLOCK_BYTES = 2**24
DELIMITERS = {"csv": ",", "tsv": "\t"}
_NOT_TEXT = re.compile("decimal|map<")  # types of Arrow without a usual form in JSON and CSV
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # `surrogateescape` makes these of bytes that are not UTF-8
_QUOTED = re.compile('[",\t\r\n]')


@dataclass(slots=True)
class Row:
    """A row, from reading to writing.

    Attributes:
        line: Number of its first line in a text file, from 1.
        raw: Its JSON object as read, for JSON Lines.
        values: Column -> value.
        error: The reason why there is no answer.
        prediction: The result of its task, as the endpoint returns it for one input.
        warnings: The warnings about its answer.
        input: The input of its task.
    """

    line: int | None = None
    raw: bytes = b""
    values: Mapping[str, Any] = field(default_factory=dict)
    error: BertServeError | None = None
    prediction: Any = None
    warnings: list[str] = field(default_factory=list)
    input: Any = None


@contextmanager
def rejecting(row: Row) -> Iterator[None]:
    """Rejects the row if the block raises an error of this service."""
    try:
        yield
    except BertServeError as error:
        row.error = error


@dataclass(slots=True)
class RowBlock:
    """Rows in the order of the file, their `size` in bytes (an estimate for CSV), and the `table` of pyarrow with the rows of Parquet."""

    rows: list[Row]
    size: int
    table: Any = None


def split_into_blocks(rows: Iterable[Row], max_rows: int) -> Iterator[RowBlock]:
    """Yields blocks of at most `max_rows` rows of a text file, and at least one block, which can be empty."""
    block = RowBlock([], 0)
    for row in rows:
        block.rows.append(row)
        block.size += len(row.raw) or sum(map(len, row.values.values()))  # CSV: characters without delimiters
        if len(block.rows) == max_rows or block.size >= BLOCK_BYTES:
            yield block
            block = RowBlock([], 0)
    yield block


def read_json_lines(path: Path, added: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of JSON Lines. A line is a row with an error unless it is a JSON object without the keys `added`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if raw := line.removeprefix(BOM_UTF8).strip():
                row = Row(number, raw)
                try:
                    row.values = orjson.loads(raw)
                except orjson.JSONDecodeError as error:
                    row.error = InvalidValueError("the line is not valid JSON: {detail}.", detail=error)
                if not isinstance(row.values, dict):
                    row.error = InvalidValueError('the line is JSON, but not an object; give one such as {"text": "A warm film."}.')
                elif key := next((key for key in added if key in row.values), None):
                    row.error = InvalidValueError("the row already has `{key}`, which the output adds; give another column name.", key=key)
                yield row


def read_delimited(path: Path, delimiter: str) -> tuple[Sequence[str], Iterator[Row]]:
    """Returns the columns and the rows of CSV or TSV in UTF-8. A row that does not fit the header is a row with an error.

    Raises:
        StartError: The header is missing, quotes are broken, or a field is longer than a block: the csv module cannot continue.
    """
    csv.field_size_limit(BLOCK_BYTES)
    records = _records(path, delimiter)
    _, columns = next(records, (1, list[str]()))
    if not columns or _row_error(columns, columns):
        raise StartError("the input has no header; a CSV file begins with a line of UTF-8 that names the columns.")
    return columns, (Row(line, b"", dict(zip(columns, fields, strict=False)), _row_error(fields, columns)) for line, fields in records)


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the first line and the fields of each record; it skips blank lines."""
    line = 1
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
        except csv.Error as error:
            hint = "separate fields by commas, or by tabs in TSV, and double the quotes in a quoted field."
            raise StartError(f"the input is broken in the row that begins on line {line}: {error}; {hint}") from error


def _row_error(fields: Sequence[str], columns: Sequence[str]) -> BertServeError | None:
    """Returns the error of a row that does not fit the header or is not UTF-8, or None."""
    if len(fields) != len(columns):
        return InvalidValueError("the row has {row} fields, the header {header}; quote delimiters.", row=len(fields), header=len(columns))
    if _NOT_UTF8.search("".join(fields)):
        return InvalidValueError("the row is not UTF-8; convert the file, for example with `iconv -t UTF-8`.")
    return None


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Raises errors of pyarrow as `StartError`."""
    try:
        yield
    except (pa.ArrowException, ValueError) as error:
        raise StartError(f"the input `{path}` cannot be read as Parquet ({error}); check its format, or write it again.") from error


def read_parquet(path: Path, inputs: Collection[str] | None, max_rows: int) -> tuple[Sequence[str], Iterator[RowBlock]]:
    """Returns the columns and the blocks of a file; rows contain the `inputs` among its columns, or all columns if it is None, for text."""
    with _arrow_errors(path):
        # INT96 counts days and nanoseconds: as 64-bit nanoseconds, times outside 1677 to 2262 would become other times
        file = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
    column = next((column for column in file.schema_arrow if _NOT_TEXT.search(str(column.type))), None)
    if column is not None and inputs is None:
        raise SettingsError(f"the column `{column.name}` has the type {column.type}, which JSON and CSV lack; remove it, or write Parquet.")

    def blocks() -> Iterator[RowBlock]:
        total, size = file.metadata.num_rows, path.stat().st_size
        decoded_size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
        if not total:
            yield RowBlock([], size, file.schema_arrow.empty_table())
        with _arrow_errors(path):
            for batch in file.iter_batches(max(1, min(max_rows, BLOCK_BYTES * total // max(decoded_size, 1)))):
                table = pa.Table.from_batches([batch])
                yield RowBlock(read_table(table, inputs), size * len(table) // total, table)

    return file.schema_arrow.names, blocks()


def read_table(table: Any, inputs: Collection[str] | None) -> list[Row]:
    """Returns the rows of a table with the `inputs` among its columns, or all if it is None. A row with a broken value gets an error."""
    table = table.select([name for name in table.column_names if inputs is None or name in inputs])
    for index, column in enumerate(table.schema):  # Python's times and durations lack nanoseconds
        if pa.types.is_timestamp(column.type) or column.type == pa.duration("ns"):
            kind = pa.timestamp("us", column.type.tz) if pa.types.is_timestamp(column.type) else pa.duration("us")
            table = table.set_column(index, column.name, table.column(index).cast(kind, safe=False))
    rows = [Row() for _ in range(len(table))]
    for index, row in enumerate(rows):
        try:
            (row.values,) = table.slice(index, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            row.error = InvalidValueError("the row has a text that is not UTF-8, or an impossible time: {detail}.", detail=error)
    return rows


def read_blocks(
    path: Path, formats: tuple[str, str], inputs: Collection[str], added: Sequence[str], max_rows: int
) -> tuple[Sequence[str], Iterator[RowBlock]]:
    """Returns the columns of a file, none for JSON Lines, and its blocks; the output gets the columns `added`."""
    if formats[0] == "parquet":
        return read_parquet(path, inputs if formats[1] == "parquet" else None, max_rows)
    columns, rows = ((), read_json_lines(path, added)) if formats[0] == "jsonl" else read_delimited(path, DELIMITERS[formats[0]])
    return columns, split_into_blocks(rows, max_rows)


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Writes JSON Lines, or with a `delimiter` CSV or TSV. Three added columns `names` are for the best label, its score, and warnings."""

    columns: Sequence[str]
    names: Sequence[str]
    delimiter: str
    json_cells: bool  # whether warnings are a list in JSON

    def write(self, block: RowBlock, _: Path | None) -> bytes:
        """Returns the answered rows."""
        return b"".join(self._line(row) for row in block.rows if row.error is None)

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """Writes all parts to a file."""
        with path.open("wb") as file:
            if self.delimiter:
                file.write(self._delimited([*self.columns, *self.names]))
            for part in parts:
                file.write(part.read_bytes())

    def _line(self, row: Row) -> bytes:
        """Returns a row with its prediction and its warnings; the object of JSON Lines is unchanged."""
        if not self.delimiter:
            added = to_json(dict(zip(self.names, (row.prediction, row.warnings), strict=True)))
            return b"%b,%b\n" % ((row.raw or to_json(row.values))[:-1], added[1:])
        answer = (row.prediction[0]["label"], row.prediction[0]["score"]) if len(self.names) == 3 else (row.prediction,)
        return self._delimited([*row.values.values(), *answer, row.warnings if self.json_cells else " | ".join(row.warnings)])

    def _delimited(self, values: Iterable[Any]) -> bytes:
        """Returns a line of CSV or TSV; null, NaN and infinity become empty cells, and other values than texts JSON."""
        cells = [value if isinstance(value, str) else to_json(value).decode().strip('"').removeprefix("null") for value in values]
        # the module csv would not quote a carriage return before a line feed
        quoted = ['"' + cell.replace('"', '""') + '"' if _QUOTED.search(cell) else cell for cell in cells]
        return (self.delimiter.join(quoted) + "\n").encode()


def with_predictions(table: Any, rows: Sequence[Row], names: Sequence[str], earlier_schema: Any) -> Any:
    """Adds nested predictions and warnings to a table; rejects rows whose prediction does not fit earlier ones, of `earlier_schema`."""
    predictions, name = [], names[0]
    schema = pa.schema([earlier_schema.field(name) if name in earlier_schema.names else (name, pa.null())])
    for row in rows:
        value = row.prediction
        if not isinstance(value, np.ndarray):  # embeddings stay numbers of four bytes
            value = to_plain(value)
        elif value.ndim == 2:
            value = list(value)
        try:
            schema = pa.unify_schemas([schema, pa.schema([(name, pa.infer_type([value]))])], promote_options="permissive")
            predictions.append(value)
        except pa.ArrowException:
            row.error = InvalidValueError("the answer has another type than earlier ones, but a Parquet column has one; write JSON Lines.")
            predictions.append(None)
    column = pa.array(predictions, schema.types[0])
    return table.append_column(name, column).append_column(names[1], pa.array([row.warnings for row in rows], pa.list_(pa.string())))


@dataclass(frozen=True, slots=True)
class ParquetWriter:
    """Writes Parquet, with `columns` and the columns `names` for predictions and warnings."""

    columns: Sequence[str]
    names: Sequence[str]

    def write(self, block: RowBlock, previous_part: Path | None) -> bytes:
        """Returns the answered rows as a file, with the types of `previous_part`."""
        schema, data = pq.read_schema(previous_part) if previous_part else pa.schema([]), pa.BufferOutputStream()
        table = block.table
        if table is None:  # the columns of CSV and TSV are texts
            values = [row.values if row.error is None else {} for row in block.rows]
            table = pa.Table.from_pylist(values, pa.schema([(column, pa.string()) for column in self.columns]))
        table = with_predictions(table, block.rows, self.names, schema)
        pq.write_table(table.filter(pa.array([row.error is None for row in block.rows], pa.bool_())), data)
        return bytes(data.getvalue())

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Writes all parts to a file."""
        # a part without an entity, for example, lacks the type of entities, but the last part has the types of all parts
        with pq.ParquetWriter(path, pq.read_schema(parts[-1])) as writer:
            for part in parts:
                writer.write_table(pq.ParquetFile(part).read().cast(writer.schema))
