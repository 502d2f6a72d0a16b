"""Rows: functions that read the rows of JSON Lines, CSV, TSV and Parquet, in blocks."""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bertserve.service.errors import BertServeError, InvalidValueError, SettingsError, StartError

with suppress(ImportError):  # the extra `parquet`
    import pyarrow as pa
    import pyarrow.parquet as pq

# Maximum bytes of a block's rows in the file, so that long rows need no more memory than short ones.
BLOCK_BYTES = 2**24
DELIMITERS = {"csv": ",", "tsv": "\t"}
_NOT_TEXT = re.compile("decimal|binary|duration|map<")  # types of Arrow that have no usual form in JSON and CSV


@dataclass(slots=True)
class Row:
    """A row, from reading to writing.

    Attributes:
        number: Its number in the file, from 1; blank lines and a header do not count.
        line: Number of its first line in a text file, from 1.
        raw: Its JSON object as read, for JSON Lines.
        values: Column -> value.
        error: The reason why it has no answer.
        prediction: The result of its task, as the endpoint returns it for one input.
        warnings: The warnings about its answer.
        request: The request of its task.
    """

    number: int
    line: int | None = None
    raw: bytes = b""
    values: Mapping[str, Any] = field(default_factory=dict)
    error: BertServeError | None = None
    prediction: Any = None
    warnings: list[str] = field(default_factory=list)
    request: Any = None


@contextmanager
def rejecting(row: Row) -> Iterator[None]:
    """Makes an error within it the reason why the row has no answer."""
    try:
        yield
    except BertServeError as error:
        row.error = error


@dataclass(slots=True)
class RowBlock:
    """Rows in the order of the file.

    Attributes:
        rows: The rows.
        size: Their bytes in the file, for the progress.
        table: The rows of Parquet, as a table of pyarrow.
        is_written: Whether an earlier run has written their answers.
    """

    rows: Sequence[Row]
    size: int
    table: Any = None
    is_written: bool = False


def blocks_of(rows: Iterable[Row], max_rows: int) -> Iterator[RowBlock]:
    """Yields blocks of at most `max_rows` rows of a text file."""
    block, size = list[Row](), 0
    for row in rows:
        block.append(row)
        size += len(row.raw) or sum(map(len, row.values.values()))
        if len(block) == max_rows or size >= BLOCK_BYTES:
            yield RowBlock(block, size)
            block, size = [], 0
    if block:
        yield RowBlock(block, size)


def read_json_lines(path: Path, added: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of JSON Lines. A line is a row with an error unless it is a JSON object without the keys `added`."""
    number = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            if raw := line.removeprefix(BOM_UTF8).strip():
                number += 1
                row = Row(number, line_number, raw)
                with rejecting(row):
                    row.values = _parse(raw, added)
                yield row


def _parse(raw: bytes, added: Sequence[str]) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidValueError("the line is not valid JSON: {detail}.", detail=error) from error
    if not isinstance(value, dict):
        raise InvalidValueError('the line is JSON, but not an object; give one such as {"text": "A warm film."}.')
    if twice := [name for name in added if name in value]:
        raise InvalidValueError("the row already has `{name}`, which the output adds; give another column name.", name=twice[0])
    return value


def read_delimited(path: Path, delimiter: str) -> tuple[Sequence[str], Iterator[Row]]:
    """Returns the columns and the rows of CSV or TSV in UTF-8. A row that does not fit the header is a row with an error.

    Raises:
        StartError: The header is missing, quotes are broken, or a field is longer than a block: the csv module cannot continue.
    """
    csv.field_size_limit(BLOCK_BYTES)
    records = _records(path, delimiter)
    _, columns = next(records, (1, list[str]()))
    if not columns or _error(columns, columns):
        raise StartError("the input has no header; a CSV file begins with a line of UTF-8 that names the columns.")
    return columns, (
        Row(number, line, b"", dict(zip(columns, fields, strict=False)), _error(fields, columns))
        for number, (line, fields) in enumerate(records, 1)
    )


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


def _error(fields: Sequence[str], columns: Sequence[str]) -> BertServeError | None:
    if len(fields) != len(columns):
        return InvalidValueError(
            "the row has {count} fields, the header {columns}; quote delimiters.", count=len(fields), columns=len(columns)
        )
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:  # a byte that is not UTF-8 became a surrogate
        return InvalidValueError("the row is not UTF-8; convert the file, for example with `iconv -t UTF-8`.")
    return None


@contextmanager
def arrow_errors(problem: str, remedy: str = "write JSON Lines, because a Parquet column has one type") -> Iterator[None]:
    """Raises errors of pyarrow as `StartError`."""
    try:
        yield
    except (pa.ArrowException, ValueError) as error:
        raise StartError(f"{problem} ({error}); {remedy}.") from error


def read_parquet(path: Path, inputs: Collection[str] | None, max_rows: int) -> tuple[Any, Iterator[RowBlock]]:
    """Returns the schema and the blocks of a file; rows have the `inputs` among its columns, or all columns if it is None, for text."""
    with arrow_errors(f"the input `{path}` cannot be read as Parquet", "check its format"):
        # INT96 has days and nanoseconds: as 64-bit nanoseconds, times outside 1677 to 2262 would become other times
        file = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
    if inputs is None and (others := [column for column in file.schema_arrow if _NOT_TEXT.search(str(column.type))]):
        raise SettingsError(
            f"the column `{others[0].name}` has the type {others[0].type}, which JSON and CSV lack; remove it, or write Parquet."
        )

    def blocks() -> Iterator[RowBlock]:
        total, size, position = file.metadata.num_rows, path.stat().st_size, 0
        decoded_size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
        with arrow_errors("the input is broken", "write it again"):
            for batch in file.iter_batches(max(1, min(max_rows, BLOCK_BYTES * total // max(decoded_size, 1)))):
                table = pa.Table.from_batches([batch])
                yield RowBlock(rows_of(table, inputs, position), size * len(table) // total, table)
                position += len(table)

    return file.schema_arrow, blocks()


def rows_of(table: Any, inputs: Collection[str] | None, before: int = 0) -> list[Row]:
    """Returns the rows of a table with the `inputs` among its columns, or all if it is None; `before` rows precede it in the file."""
    columns = {}
    for name in table.column_names:
        if inputs is None or name in inputs:
            column = table.column(name)
            if pa.types.is_timestamp(column.type):  # Python has no nanoseconds
                column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
            with arrow_errors(f"the column `{name}` has a value that is not a text", "convert it to UTF-8"):
                columns[name] = column.to_pylist()
    rows = zip(*columns.values(), strict=True)
    return [Row(number, values=dict(zip(columns, row, strict=True))) for number, row in enumerate(rows, before + 1)]
