"""Readers and writers of the text formats: JSON Lines, CSV and TSV."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from bertserve.service.errors import BertServeError, InvalidValueError, SettingsError, StartError, TooLargeError, plural
from bertserve.service.scoring.row import Place, Row, RowAnswer, Window
from bertserve.service.wire.json_text import to_json
from bertserve.service.wire.reading import parse_json
from bertserve.service.wire.unknown_fields import at_column

_BOM = b"\xef\xbb\xbf"


def first_twice(names: Sequence[str]) -> str | None:
    """Returns the first name that occurs more than once, or None; a header may have a million names."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


class TextLines:
    """Reads lines, and counts bytes and lines."""

    def __init__(self, file: BinaryIO, place: Place, max_bytes: int) -> None:
        """Starts at a place.

        Args:
            file: The file, at its beginning.
            place: The place to start at; for a file without random access it is the beginning.
            max_bytes: Maximum bytes of a line.
        """
        self._file, self._max_bytes = file, max_bytes
        self.offset, self.number = place.offset, place.line
        if place.offset:
            file.seek(place.offset)

    def next(self) -> tuple[bytes, bool]:
        """Returns the next line with its end, and whether it is complete; b"" at the end of the file. A line over the limit is cut.

        Raises:
            StartError: The file cannot be read.
        """
        line = self._readline(self._max_bytes + 1)
        self.offset += len(line)
        self.number += bool(line)
        whole = len(line) <= self._max_bytes
        piece = line
        while not whole and not piece.endswith(b"\n"):
            piece = self._readline(2**20)
            self.offset += len(piece)
            if not piece:
                break
        if self.number == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line, whole

    def _readline(self, max_bytes: int) -> bytes:
        try:
            return self._file.readline(max_bytes)
        except OSError as error:
            raise StartError(f"the input cannot be read after line {self.number} ({error.strerror}).") from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class JsonLinesReader:
    """Reads rows of JSON Lines. A line that is not a JSON object is a row with an error."""

    # lines may have different fields
    columns: Sequence[str] | None = None

    def __init__(self, file: BinaryIO, place: Place, *, max_bytes: int) -> None:
        """Starts at a place, with lines of at most `max_bytes`."""
        self._lines = TextLines(file, place, max_bytes)
        self._row, self._max_bytes = place.row, max_bytes

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, within both limits but at least one; None at the end."""
        rows: list[Row] = []
        size = 0
        while len(rows) < max_rows and size < max_bytes:
            before = self._lines.offset
            line, whole = self._lines.next()
            if not line:
                break
            if not line.isspace():
                rows.append(self._read(line, whole, self._lines.offset - before))
                size += len(line)
        return Window(rows, Place(self._lines.offset, self._row, self._lines.number)) if rows else None

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _read(self, line: bytes, whole: bool, size: int) -> Row:
        self._row += 1
        row = Row(self._row, line=self._lines.number, size=size, raw=line.strip())
        try:
            if not whole:
                raise TooLargeError(
                    "the line has more than {max_bytes} bytes; shorten it, or raise --max-body-bytes.", max_bytes=self._max_bytes
                )
            value = parse_json(row.raw, finite=True)  # the line is written again unchanged
            if not isinstance(value, dict):
                raise InvalidValueError('the line is JSON, but not an object; give one such as {"text": "A warm film."}.')
            row.values = value
        except BertServeError as error:
            row.error, row.raw = error, b""
            if isinstance(error.__cause__, ValueError):
                row.error = InvalidValueError(
                    "the line is not valid JSON: {detail}.", detail=_reason(line) or at_column(line, str(error.__cause__))
                )
        return row


def _reason(line: bytes) -> str | None:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} of it is not UTF-8"
    with suppress(BertServeError):
        parse_json(line)
        return "it has `NaN` or `Infinity`; write `null` instead"
    return None


class JsonLinesWriter:
    """Converts rows and answers to JSON Lines."""

    head = b""

    def __init__(self, prediction: str, warnings: str) -> None:
        """Takes the names of the two additional columns."""
        self._names = [f",{json.dumps(name, ensure_ascii=False)}:".encode() for name in (prediction, warnings)]

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the lines of the rows that have an answer, and the errors of rows that cannot be written, by index."""
        prediction, warnings = self._names
        lines = []
        for row, answer in zip(window.rows, answers, strict=True):
            if answer.error is None:
                raw = row.raw or to_json(row.values)
                # the input stays unchanged, with numbers of any length and its order of keys
                lines.append(b"".join((raw[:-1], prediction, to_json(answer.prediction), warnings, to_json(answer.warnings), b"}\n")))
        return b"".join(lines), {}


DELIMITERS = {"csv": ",", "tsv": "\t"}


class DelimitedReader:
    """Reads rows of CSV or TSV in UTF-8."""

    def __init__(self, file: BinaryIO, place: Place, *, delimiter: str, max_bytes: int) -> None:
        """Reads the header, and starts at a place.

        Args:
            file: The file, at its beginning.
            place: The place to start at.
            delimiter: The delimiter of fields.
            max_bytes: Maximum bytes of a line, and maximum characters of a field.

        Raises:
            StartError: There is no header, or the file is not CSV in UTF-8.
            SettingsError: Two columns have the same name.
        """
        csv.field_size_limit(max_bytes)
        self._delimiter, self._max_bytes, self._undecodable = delimiter, max_bytes, False
        self._lines = TextLines(file, Place(), max_bytes)
        self._start(0)
        header = self._next()
        if not header or self._undecodable:
            raise StartError("the input has no header; a CSV file begins with a line of UTF-8 that names the columns.")
        self.columns: Sequence[str] = header
        if (twice := first_twice(header)) is not None:
            raise SettingsError(f"the header of the input has the column `{twice[:64]}` twice; give each its own name.")
        if place.offset:
            self._lines = TextLines(file, place, max_bytes)
        self._start(place.row)

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, within both limits but at least one; None at the end.

        Raises:
            StartError: A quote does not end, a line is too long, or the file is not CSV.
        """
        rows: list[Row] = []
        size = 0
        while len(rows) < max_rows and size < max_bytes:
            before, line = self._lines.offset, self._lines.number + 1
            fields = self._next()
            if fields is None:
                break
            if fields:  # a blank line is not a row
                self._row += 1
                rows.append(self._read(fields, line, self._lines.offset - before))
                size += rows[-1].size
        return Window(rows, Place(self._lines.offset, self._row, self._lines.number)) if rows else None

    def _start(self, row: int) -> None:
        self._row = row
        self._records = csv.reader(self._decoded(), delimiter=self._delimiter, strict=True)

    def _decoded(self) -> Iterator[str]:
        while (next_line := self._lines.next())[0] != b"":
            line, whole = next_line
            if not whole:  # the missing part may contain a closing quote, so the start of the next row is unknown
                raise StartError(
                    f"line {self._lines.number} of the input has more than {self._max_bytes} bytes; shorten it, or raise --max-body-bytes."
                )
            try:
                yield line.decode()
            except UnicodeDecodeError:
                self._undecodable = True
                yield line.decode(errors="surrogateescape")

    def _next(self) -> list[str] | None:
        self._undecodable = False
        line = self._lines.number + 1
        try:
            return next(self._records, None)
        except csv.Error as error:
            raise StartError(
                f"the input is broken in the row that begins on line {line}: {error}; quote each field that has quotes "
                "or line breaks, and double the quotes in it. Fix the file, and start again with --restart."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _read(self, fields: list[str], line: int, size: int) -> Row:
        row = Row(self._row, line=line, size=size)
        if self._undecodable:
            row.error = InvalidValueError("the row is not UTF-8; convert the file, for example with `iconv -t UTF-8`.")
        elif len(fields) != len(self.columns):
            row.error = InvalidValueError(
                "the row has {fields}, but the header has {columns_count}; quote fields that have a delimiter.",
                fields=plural(len(fields), "field"),
                columns_count=len(self.columns),
            )
        else:
            row.values = dict(zip(self.columns, fields, strict=True))
        return row


class DelimitedWriter:
    """Converts rows and answers to CSV or TSV; values other than texts and numbers become JSON."""

    def __init__(self, columns: Sequence[str], names: Sequence[str], *, delimiter: str, json_cells: bool) -> None:
        """Creates it.

        Args:
            columns: The columns of the input.
            names: Names of the additional columns: prediction and warnings, or label, score and warnings.
            delimiter: The delimiter of fields.
            json_cells: Whether warnings are JSON instead of text.
        """
        self._columns, self._added, self._delimiter, self._json_cells = columns, names, delimiter, json_cells
        self.head = self._encoded([[*columns, *names]])

    def write(self, window: Window, answers: Sequence[RowAnswer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the rows that have an answer, and the errors of rows that cannot be written, by index."""
        return self._encoded(
            [
                *(_cell(row.values[name]) for name in self._columns),
                *self._prediction(answer.prediction),
                to_json(answer.warnings).decode() if answer.warnings and self._json_cells else " | ".join(answer.warnings),
            ]
            for row, answer in zip(window.rows, answers, strict=True)
            if answer.error is None
        ), {}

    def _prediction(self, prediction: Any) -> list[str]:
        if len(self._added) == 2:
            return [to_json(prediction).decode()]
        best = prediction[0]
        return [best["label"], to_json(best["score"]).decode()]

    def _encoded(self, rows: Iterator[list[str]] | list[list[str]]) -> bytes:
        lines = _Lines()
        csv.writer(lines, delimiter=self._delimiter, lineterminator=_END).writerows(rows)
        return "".join(lines).encode()


# csv quotes fields with a character of the line terminator; this one has both characters that end a line for readers
_END = "\r\n"


class _Lines(list[str]):
    """Receives lines of csv, and replaces their line ends."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix(_END) + "\n")


def _cell(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else to_json(value).decode()
