"""Records of scoring: a row of a file, a window of rows, the place after them, and what became of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bertserve.service.errors import BertServeError


@dataclass(frozen=True, slots=True)
class Place:
    """How far a file was read.

    Attributes:
        offset: Bytes of a text file; rows of a Parquet file.
        row: Rows.
        line: Lines of a text file.
    """

    offset: int = 0
    row: int = 0
    line: int = 0


@dataclass(slots=True)
class Row:
    """A row that was read.

    Attributes:
        number: Its number in the file, from 1; blank lines and a header do not count.
        values: Its columns by name.
        line: The line on which it begins, from 1, of a text file.
        size: What it counts for in the progress: bytes of a text file, 1 of a Parquet file.
        raw: The JSON object that it was read from, of JSON Lines.
        error: Why it could not be read.
    """

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    line: int | None = None
    size: int = 1
    raw: bytes = b""
    error: BertServeError | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are sorted by length together.

    Attributes:
        rows: In the order of the file.
        after: The place after them.
        table: The rows as an Arrow table, of a Parquet file.
    """

    rows: list[Row]
    after: Place
    table: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model made of a row.

    Attributes:
        prediction: The task's result, as its endpoint gives it for one input; None where there is an error.
        warnings: What was cut off, and what else the caller should know.
        error: Why there is no prediction.
    """

    prediction: Any = None
    warnings: tuple[str, ...] = ()
    error: BertServeError | None = None
