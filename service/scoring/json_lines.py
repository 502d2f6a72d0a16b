"""JSON Lines: an object in each line. What was read is written as it stood, with the prediction and the warnings behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from bertserve.service.errors import BertServeError, InvalidValueError, TooLargeError
from bertserve.service.scoring.row import Answer, Place, Row, Window
from bertserve.service.scoring.text_lines import TextLines
from bertserve.service.wire.reading import parse_json
from bertserve.service.wire.rendering import to_json


class JsonLinesReader:
    """Reads rows of JSON Lines. A line that is no JSON object is a row with an error."""

    # lines may differ in what they have
    columns: Sequence[str] | None = None

    def __init__(self, file: BinaryIO, place: Place, *, max_bytes: int) -> None:
        """Begins to read at a place, lines of at most `max_bytes`."""
        self._lines = TextLines(file, place, max_bytes)
        self._row, self._max_bytes = place.row, max_bytes

    def window(self, max_rows: int, max_bytes: int) -> Window | None:
        """Returns the next rows, as many as both limits allow and at least one; None at the end."""
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
            value = parse_json(row.raw, finite=True)  # the line is written again as it stands
            if not isinstance(value, dict):
                raise InvalidValueError('the line is JSON, but no object; give one such as {"text": "A warm film."}.')
            row.values = value
        except BertServeError as error:
            row.error, row.raw = error, b""
            if isinstance(error.__cause__, ValueError):
                row.error = InvalidValueError("the line is not valid JSON: {detail}.", detail=_reason(line) or error.__cause__)
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
    """Makes JSON Lines of rows and answers."""

    def __init__(self, prediction: str, warnings: str) -> None:
        """Takes the names of the two columns that it adds."""
        self._names = [f", {json.dumps(name, ensure_ascii=False)}: ".encode() for name in (prediction, warnings)]

    def begin(self) -> bytes:
        """Returns what stands before the first row."""
        return b""

    def write(self, window: Window, answers: Sequence[Answer]) -> tuple[bytes, dict[int, BertServeError]]:
        """Returns the lines of the rows that have an answer, and the errors of rows that cannot be written, by their index."""
        prediction, warnings = self._names
        lines = []
        for row, answer in zip(window.rows, answers, strict=True):
            if answer.error is None:
                raw = row.raw or to_json(dict(row.values))
                # what was read stays as it stood: numbers of any length, keys in their order
                lines.append(b"".join((raw[:-1], prediction, to_json(answer.prediction), warnings, to_json(answer.warnings), b"}\n")))
        return b"".join(lines), {}
