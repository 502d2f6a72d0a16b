"""Records of scoring: a row of a file, a window of rows, a place in a file, and the answer of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bertserve.service.errors import BertServeError


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file.

    Attributes:
        offset: Bytes of a text file; rows of a Parquet file.
        row: Number of rows before it.
        line: Number of lines before it, in a text file.
    """

    offset: int = 0
    row: int = 0
    line: int = 0


@dataclass(slots=True)
class Row:
    """A row of the input.

    Attributes:
        number: Its number in the file, from 1; blank lines and a header do not count.
        values: Values by column.
        line: Number of its first line in a text file, from 1.
        size: Its size for the progress: bytes in a text file, 1 in a Parquet file.
        raw: Its JSON object as read, for JSON Lines.
        error: The error if it could not be read.
    """

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    line: int | None = None
    size: int = 1
    raw: bytes = b""
    error: BertServeError | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Rows, in the order of the file, that are sorted by length together, and the place after them; for Parquet also as an Arrow table."""

    rows: list[Row]
    after: Place
    table: Any = None


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer of a row: the task's result, as its endpoint returns it for one input, or None and an error."""

    prediction: Any = None
    warnings: tuple[str, ...] = ()
    error: BertServeError | None = None
