"""Rows of JSON Lines, CSV and TSV: functions that read rows, and writers that turn answered rows into bytes."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from bertserve.service.errors import BertServeError, InvalidValueError, StartError, TooLargeError
from bertserve.service.tasks.json_text import to_json

# Maximum bytes of a window's rows in the file, so that long rows need no more memory than short ones.
WINDOW_BYTES = 2**24
_QUOTED = re.compile('[",\t\r\n]')


@dataclass(slots=True)
class Row:
    """A row, from reading to writing."""

    number: int  # in the file, from 1; blank lines and a header do not count
    size: int = 1  # its bytes in a text file; the progress counts them
    line: int | None = None  # number of its first line in a text file, from 1
    raw: bytes = b""  # its JSON object as read, for JSON Lines
    values: Mapping[str, Any] = field(default_factory=dict)  # by column
    error: BertServeError | None = None  # the reason why it has no answer
    prediction: Any = None  # the result of its task, as the endpoint returns it for one input
    warnings: Sequence[str] = ()
    request: Any = None


@dataclass(slots=True)
class Window:
    """Rows in the order of the file."""

    rows: Sequence[Row]
    table: Any = None  # the rows of Parquet
    rejected: bytes | None = None  # lines about the rows without an answer; None until the window is written


def windows_of(rows: Iterable[Row], max_rows: int) -> Iterator[Window]:
    """Yields windows of at most `max_rows` rows of a text file."""
    window, size = list[Row](), 0
    for row in rows:
        window.append(row)
        size += row.size
        if len(window) == max_rows or size >= WINDOW_BYTES:
            yield Window(window)
            window, size = [], 0
    if window:
        yield Window(window)


def read_json_lines(file: BinaryIO, max_bytes: int, added: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of JSON Lines. A line is a row with an error unless it is a JSON object, in `max_bytes`, without the keys `added`."""
    number = 0
    for line_number, line in enumerate(file, 1):
        if raw := line.strip():
            number += 1
            row = Row(number, len(line), line_number, raw)
            try:
                row.values = _parsed(raw, max_bytes, added)
            except BertServeError as error:
                row.error = error
            yield row


def _parsed(raw: bytes, max_bytes: int, added: Sequence[str]) -> dict[str, Any]:
    if len(raw) > max_bytes:
        raise TooLargeError("the line has more than {limit} bytes; shorten it, or raise --max-body-bytes.", limit=max_bytes)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidValueError("the line is not valid JSON: {detail}.", detail=error) from error
    if not isinstance(value, dict):
        raise InvalidValueError('the line is JSON, but not an object; give one such as {"text": "A warm film."}.')
    if twice := [name for name in added if name in value]:
        raise InvalidValueError("the row already has `{name}`, which the output adds; give another column name.", name=twice[0])
    return value


def read_delimited(file: BinaryIO, delimiter: str, max_chars: int) -> tuple[Sequence[str], Iterator[Row]]:
    """Returns the columns and the rows of CSV or TSV in UTF-8. A row that does not fit the header is a row with an error.

    A `StartError` says that quotes are broken, or that a field has more than `max_chars` characters; the csv module cannot continue.
    """
    csv.field_size_limit(max_chars)
    records = _records(csv.reader((line.decode(errors="surrogateescape") for line in file), delimiter=delimiter, strict=True))
    _, columns = next(records, (1, list[str]()))
    if not columns or _error(columns, columns):
        raise StartError("the input has no header; a CSV file begins with a line of UTF-8 that names the columns.")
    return columns, (
        Row(number, len(fields) + sum(map(len, fields)), line, b"", dict(zip(columns, fields, strict=False)), _error(fields, columns))
        for number, (line, fields) in enumerate(records, 1)
    )


def _records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the first line and the fields of each record; it skips blank lines."""
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise StartError(
            f"the input is broken in the row that begins on line {line}: {error}; separate fields by commas, not semicolons, or by tabs "
            "with --input-format tsv, and double the quotes in a quoted field."
        ) from error


def _error(fields: Sequence[str], columns: Sequence[str]) -> BertServeError | None:
    if len(fields) != len(columns):
        return InvalidValueError(
            "the row has {count} fields, and the header {columns}; quote fields that have a delimiter.",
            count=len(fields),
            columns=len(columns),
        )
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:  # a byte that is not UTF-8 became a surrogate
        return InvalidValueError("the row is not UTF-8; convert the file, for example with `iconv -t UTF-8`.")
    return None


class Writer:
    """Turns windows into bytes, and joins the parts of a file; `head` has the bytes before the first row."""

    head = b""

    def write(self, window: Window) -> bytes:
        """Returns the rows that have an answer."""
        return b"".join(self._line(row) for row in window.rows if row.error is None)

    def _line(self, row: Row) -> bytes:
        raise NotImplementedError

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """Writes all parts to a file."""
        with path.open("wb") as file:
            file.write(self.head)
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)


class JsonLinesWriter(Writer):
    """Writes JSON Lines, with the input's objects unchanged; `names` are the columns for predictions and warnings."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def _line(self, row: Row) -> bytes:
        added = to_json(dict(zip(self._names, (row.prediction, row.warnings), strict=True)))
        return b"%b,%b\n" % ((row.raw or to_json(row.values))[:-1], added[1:])


class DelimitedWriter(Writer):
    """Writes CSV or TSV; `names` are the columns for label, score and warnings, or for predictions and warnings."""

    def __init__(self, columns: Sequence[str], names: Sequence[str], delimiter: str) -> None:
        self._has_label, self._delimiter = len(names) == 3, delimiter
        self.head = self._encoded([*columns, *names])

    def _line(self, row: Row) -> bytes:
        answer = (row.prediction[0]["label"], row.prediction[0]["score"]) if self._has_label else (row.prediction,)
        return self._encoded([*row.values.values(), *answer, " | ".join(row.warnings)])

    def _encoded(self, values: Iterable[Any]) -> bytes:
        """Returns a line. The module csv would not quote a carriage return before a line feed."""
        # values other than texts become JSON, and dates and times without its quotes
        cells = ["" if value is None else value if isinstance(value, str) else to_json(value).decode().strip('"') for value in values]
        quoted = ['"' + cell.replace('"', '""') + '"' if _QUOTED.search(cell) else cell for cell in cells]
        return (self._delimiter.join(quoted) + "\n").encode()
