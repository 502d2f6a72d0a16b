"""Rows of JSON Lines, CSV and TSV: readers yield windows of rows, and writers turn rows with their answers into bytes."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from bertserve.service.errors import BertServeError, InvalidValueError, StartError, TooLargeError
from bertserve.service.wire.json_text import to_json

# Maximum bytes of a window's rows in the file, so that long rows need no more memory than short ones.
WINDOW_BYTES = 2**24


@dataclass(slots=True)
class Row:
    """A row of the input.

    Attributes:
        number: Its number in the file, from 1; blank lines and a header do not count.
        values: Values by column.
        line: Number of its first line in a text file, from 1.
        raw: Its JSON object as read, for JSON Lines.
        error: The error if it could not be read.
    """

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None
    raw: bytes = b""
    error: BertServeError | None = None


@dataclass(slots=True)
class RowAnswer:
    """The answer of a row: the task's result, as its endpoint returns it for one input, or None and an error."""

    prediction: Any = None
    warnings: list[str] = field(default_factory=list)
    error: BertServeError | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Rows in the order of the file, the position in the file after them, and for Parquet the rows as an Arrow table."""

    rows: Sequence[Row]
    position: int
    table: Any = None


class Reader:
    """Reads the rows of a file of lines.

    Attributes:
        total: Size of the file, in the unit of positions; None for a stream.
        columns: The columns of all rows; None if rows can differ.
        header: The first line of CSV or TSV.
        added: The columns that the output adds.
    """

    columns: Sequence[str] | None = None
    header = ""
    added: Sequence[str] = ()

    def __init__(self, file: BinaryIO, total: int | None, max_bytes: int) -> None:
        """Takes an open file, its bytes, and the maximum bytes of a line."""
        self._file, self.total, self._max_bytes = file, total, max_bytes

    def windows(self, max_rows: int) -> Iterator[Window]:
        """Yields all rows.

        Raises:
            StartError: The file is broken.
            OSError: The file cannot be read.
        """
        rows, size = list[Row](), 0
        for row, row_bytes in self._rows():
            rows.append(row)
            size += row_bytes
            if len(rows) == max_rows or size >= WINDOW_BYTES:
                yield Window(rows, self._position())
                rows, size = [], 0
        if rows:
            yield Window(rows, self._position())

    def _position(self) -> int:
        return 0 if self.total is None else self._file.tell()

    def _rows(self) -> Iterator[tuple[Row, int]]:
        """Yields each row with about its number of bytes."""
        raise NotImplementedError


class JsonLinesReader(Reader):
    """Reads JSON Lines. A line that is not a JSON object is a row with an error."""

    def _rows(self) -> Iterator[tuple[Row, int]]:
        number = 0
        for line_number, line in enumerate(iter(partial(self._file.readline, self._max_bytes + 1), b""), 1):
            stripped = line.strip() if line_number > 1 else line.removeprefix(b"\xef\xbb\xbf").strip()
            if stripped:
                number += 1
                row = Row(number, line=line_number, raw=stripped)
                row.error = self._parse(row, line)
                yield row, len(line)

    def _parse(self, row: Row, line: bytes) -> BertServeError | None:
        if len(line) > self._max_bytes:
            while line and not line.endswith(b"\n"):
                line = self._file.readline(2**20)
            return TooLargeError("the line has more than {limit} bytes; shorten it, or raise --max-body-bytes.", limit=self._max_bytes)
        try:
            row.values = orjson.loads(row.raw)
        except orjson.JSONDecodeError as error:
            return InvalidValueError("the line is not valid JSON: {detail}.", detail=error)
        if not isinstance(row.values, dict):
            return InvalidValueError('the line is JSON, but not an object; give one such as {"text": "A warm film."}.')
        if twice := [name for name in self.added if name in row.values]:
            return InvalidValueError("the row already has `{name}`, which the output adds; give another column name.", name=twice[0])
        return None


class DelimitedReader(Reader):
    """Reads CSV or TSV in UTF-8."""

    columns: Sequence[str]

    def __init__(self, file: BinaryIO, total: int | None, max_bytes: int, delimiter: str) -> None:
        """Reads the header.

        Raises:
            StartError: There is no header, or a line is too long.
        """
        super().__init__(file, total, max_bytes)
        csv.field_size_limit(max_bytes)
        self._records = csv.reader(self._lines(), delimiter=delimiter, strict=True)
        try:
            self.columns = next(self._records, [])
        except csv.Error:  # it may have another delimiter
            self.columns = [self.header]
        if not self.columns or not _is_utf8(self.columns):
            raise StartError("the input has no header; a CSV file begins with a line of UTF-8 that names the columns.")

    def _lines(self) -> Iterator[str]:
        for line in iter(partial(self._file.readline, self._max_bytes + 1), b""):
            if len(line) > self._max_bytes:  # the rest may contain a closing quote, so the start of the next row is unknown
                number = self._records.line_num + 1
                raise StartError(
                    f"line {number} of the input has more than {self._max_bytes} bytes; shorten it, or raise --max-body-bytes."
                )
            text = line.decode(errors="surrogateescape")
            if not self.header:
                self.header = text = text.removeprefix("\ufeff")
            yield text

    def _rows(self) -> Iterator[tuple[Row, int]]:
        number, line = 0, self._records.line_num + 1
        try:
            for fields in self._records:
                if fields:  # a blank line is not a row
                    number += 1
                    yield self._row(fields, number, line), sum(map(len, fields))
                line = self._records.line_num + 1
        except csv.Error as error:
            raise StartError(
                f"the input is broken in the row that begins on line {line}: {error}; quote each field that has quotes "
                "or line breaks, and double the quotes in it."
            ) from error

    def _row(self, fields: list[str], number: int, line: int) -> Row:
        row = Row(number, line=line)
        if len(fields) != len(self.columns):
            row.error = InvalidValueError(
                "the number of fields is {count}, but the header has {columns}; quote fields that have a delimiter.",
                count=len(fields),
                columns=len(self.columns),
            )
        elif not _is_utf8(fields):
            row.error = InvalidValueError("the row is not UTF-8; convert the file, for example with `iconv -t UTF-8`.")
        else:
            row.values = dict(zip(self.columns, fields, strict=True))
        return row


def _is_utf8(fields: Sequence[str]) -> bool:
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:  # a byte that is not UTF-8 became a surrogate
        return False
    return True


class Writer:
    """Turns rows and answers into bytes, and joins the parts of a file; `head` has the bytes before the first row."""

    head = b""

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> bytes:
        """Returns the rows that have an answer."""
        raise NotImplementedError

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Writes all parts to a file."""
        with path.open("wb") as file:
            file.write(self.head)
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)


class JsonLinesWriter(Writer):
    """Writes JSON Lines. The input's objects stay unchanged, with numbers of any length."""

    def __init__(self, names: Sequence[str]) -> None:
        """Takes the names of the columns for predictions and warnings."""
        self._prediction, self._warnings = (f",{json.dumps(name, ensure_ascii=False)}:".encode() for name in names)

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> bytes:
        """Returns the lines of the rows that have an answer."""
        pieces: list[bytes] = []
        for row, answer in zip(window.rows, answers, strict=True):
            if answer.error is None:
                pieces += ((row.raw or to_json(row.values))[:-1], self._prediction, to_json(answer.prediction))
                pieces += (self._warnings, to_json(answer.warnings), b"}\n")
        return b"".join(pieces)


class DelimitedWriter(Writer):
    """Writes CSV or TSV; values other than texts and numbers become JSON."""

    def __init__(self, columns: Sequence[str], names: Sequence[str], delimiter: str, *, json_cells: bool) -> None:
        """Creates it.

        Args:
            columns: The columns of the input.
            names: Names of the additional columns: prediction and warnings, or label, score and warnings.
            delimiter: The delimiter of fields.
            json_cells: Whether warnings are JSON instead of text.
        """
        self._columns, self._names, self._delimiter, self._json_cells = columns, names, delimiter, json_cells
        self.head = self._encoded([[*columns, *names]])

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> bytes:
        """Returns the rows that have an answer."""
        return self._encoded(
            [*(_cell(row.values[name]) for name in self._columns), *self._answer_cells(answer)]
            for row, answer in zip(window.rows, answers, strict=True)
            if answer.error is None
        )

    def _answer_cells(self, answer: RowAnswer) -> list[str]:
        warnings = _cell(answer.warnings or None) if self._json_cells else " | ".join(answer.warnings)
        if len(self._names) == 2:
            return [to_json(answer.prediction).decode(), warnings]
        best = answer.prediction[0]
        return [best["label"], _cell(best["score"]), warnings]

    def _encoded(self, rows: Iterable[Sequence[str]]) -> bytes:
        lines = _Lines()
        csv.writer(lines, delimiter=self._delimiter, lineterminator="\r\n").writerows(rows)
        return "".join(lines).encode()


class _Lines(list[str]):
    """Lines that end with a line feed. csv must write two characters, because it quotes only fields with a character of its line end."""

    def write(self, line: str) -> None:
        self.append(line[:-2] + "\n")


def _cell(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else to_json(value).decode()
