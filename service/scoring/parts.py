"""Parts: writers that turn answered rows into bytes, and the files of a run. Each block becomes a part, and at the end they become one file.

`part-00042` has the rows of block 42 that have an answer, and `rejected-00042` a line about each of the others. A file appears under its
name when it is complete. So a run that was killed continues with the parts that are missing, and gives the same bytes.
"""

from __future__ import annotations

import filecmp
import hashlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.service.errors import SettingsError, status_and_type
from bertserve.service.scoring.rows import Row, RowBlock, arrow_errors
from bertserve.service.tasks.json_text import to_json, to_plain

with suppress(ImportError):  # the extra `parquet`
    import pyarrow as pa
    import pyarrow.parquet as pq

_QUOTED = re.compile('[",\t\r\n]')


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Turns blocks into lines, and joins the parts of a file; `head` has the bytes before the first row."""

    line: Callable[[Row], bytes]
    head: bytes

    def write(self, block: RowBlock) -> bytes:
        """Returns the rows that have an answer."""
        return b"".join(self.line(row) for row in block.rows if row.error is None)

    def join(self, parts: Iterable[Path], path: Path) -> None:
        """Writes all parts to a file."""
        with path.open("wb") as file:
            file.write(self.head)
            for part in parts:
                file.write(part.read_bytes())


def json_line(row: Row, names: Sequence[str]) -> bytes:
    """Returns a row's object, unchanged, with its prediction and its warnings as `names`."""
    added = to_json(dict(zip(names, (row.prediction, row.warnings), strict=True)))
    return b"%b,%b\n" % ((row.raw or to_json(row.values))[:-1], added[1:])


def delimited_line(values: Iterable[Any], delimiter: str) -> bytes:
    """Returns a line of CSV or TSV; null becomes an empty cell, and values other than texts JSON."""
    cells = [value if isinstance(value, str) else "" if value is None else to_json(value).decode().strip('"') for value in values]
    # the module csv would not quote a carriage return before a line feed
    quoted = ['"' + cell.replace('"', '""') + '"' if _QUOTED.search(cell) else cell for cell in cells]
    return (delimiter.join(quoted) + "\n").encode()


def with_predictions(table: Any, rows: Sequence[Row], names: Sequence[str]) -> Any:
    """Returns a table with columns for predictions, nested, and for warnings."""
    predictions = [row.prediction for row in rows]
    if any(isinstance(prediction, np.ndarray) for prediction in predictions):  # embeddings stay numbers of four bytes
        predictions = [list(value) if isinstance(value, np.ndarray) and value.ndim == 2 else value for value in predictions]
    else:
        predictions = to_plain(predictions)
    with arrow_errors("the predictions have different types"):
        column = pa.array(predictions)
    return table.append_column(names[0], column).append_column(names[1], pa.array([row.warnings for row in rows], pa.list_(pa.string())))


def unified_schema(schemas: Sequence[Any]) -> Any:
    """Returns a schema for tables with several schemas: a block without an entity, for example, does not show the type of entities."""
    with arrow_errors("the predictions have different types"):
        return pa.unify_schemas(schemas, promote_options="permissive")


class ParquetWriter:
    """Writes Parquet; `schema` is that of the input or its columns of texts, and `names` are the columns for predictions and warnings."""

    def __init__(self, schema: Any, names: Sequence[str]) -> None:
        self._schema = schema if isinstance(schema, pa.Schema) else pa.schema([(column, pa.string()) for column in schema])
        self._names, self._empty = names, with_predictions(self._schema.empty_table(), [], names).schema

    def write(self, block: RowBlock) -> bytes:
        """Returns the rows that have an answer, as a file."""
        rows = [row for row in block.rows if row.error is None]
        if block.table is None:
            table = pa.Table.from_pylist([dict(row.values) for row in rows], self._schema)
        else:
            table = block.table.filter(pa.array([row.error is None for row in block.rows]))
        data = io.BytesIO()
        pq.write_table(with_predictions(table, rows, self._names), data)
        return data.getvalue()

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Writes all parts to a file."""
        schema = unified_schema([self._empty, *map(pq.read_schema, parts)])
        with pq.ParquetWriter(path, schema) as writer:
            for part in parts:
                with pq.ParquetFile(part) as file:
                    writer.write_table(file.read().cast(schema))


class Parts:
    """The parts of an output file, in a folder whose name has a digest of everything that affects the bytes of the output."""

    def __init__(self, output: Path, rejected: Path, writer: LineWriter | ParquetWriter, facts: Any) -> None:
        """Finds the parts of an earlier run with the same `facts` that was stopped; without them, `output` and `rejected` must be new."""
        self.output, self.rejected, self._writer = output, rejected, writer
        self._folder = output.with_name(f"{output.name}.parts-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}")
        if output.resolve() == rejected.resolve():
            raise SettingsError("the output and --rejected are the same file; give another name.")
        if not self._folder.exists():  # else they can be those of a run that was killed before it removed its parts
            _check_new(output)
            _check_new(rejected)

    def _path(self, kind: str, index: int) -> Path:
        return self._folder / f"{kind}-{index:05}"

    def mark_written(self, blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
        """Yields blocks, and marks those whose files exist."""
        for index, block in enumerate(blocks):
            block.is_written = self._path("part", index).exists() and self._path("rejected", index).exists()
            yield block

    def write(self, index: int, block: RowBlock) -> None:
        """Writes the part of a block."""
        self._folder.mkdir(exist_ok=True)
        for kind, content in (("rejected", _reasons(block)), ("part", self._writer.write(block))):
            path = self._temporary_path(kind)
            path.write_bytes(content)
            _move(path, self._path(kind, index))

    def finish(self, count: int) -> int:
        """Joins `count` parts to the output, and to the file of rejected rows if there are any; returns the number of these rows."""
        self._folder.mkdir(exist_ok=True)
        output, rejected = self._temporary_path("output"), self._temporary_path("rejected")
        self._writer.join([self._path("part", index) for index in range(count)], output)
        reasons = b"".join(self._path("rejected", index).read_bytes() for index in range(count))
        rejected.write_bytes(reasons)
        if reasons:
            _publish(rejected, self.rejected)
        _publish(output, self.output)
        shutil.rmtree(self._folder)
        return reasons.count(b"\n")

    def _temporary_path(self, name: str) -> Path:
        return self._folder / f".{name}-{os.getpid()}"  # not that of another run


class Stream:
    """Stdout as the output, and stderr for the reasons of rows without an answer. Such a run has no parts, and cannot continue."""

    rejected = "see above"

    def __init__(self, writer: LineWriter) -> None:
        """Writes the bytes before the first row."""
        self._writer, self._rejected = writer, 0
        sys.stdout.buffer.write(writer.head)

    def write(self, index: int, block: RowBlock) -> None:
        """Writes a block, and the reasons of its rows without an answer."""
        reasons = _reasons(block)
        self._rejected += reasons.count(b"\n")
        sys.stderr.write(reasons.decode())
        sys.stdout.buffer.write(self._writer.write(block))
        sys.stdout.buffer.flush()

    def finish(self, count: int) -> int:
        """Returns the number of rows without an answer."""
        return self._rejected


def _reasons(block: RowBlock) -> bytes:
    """Returns a line for each row without an answer."""
    return b"".join(
        to_json({"row": row.number, "line": row.line, "error": row.error.message, "error_type": status_and_type(row.error)[1]}) + b"\n"
        for row in block.rows
        if row.error is not None
    )


def _check_new(path: Path) -> None:
    if os.path.lexists(path):
        raise SettingsError(f"`{path}` exists already; remove it, or give another name.")


def _publish(path: Path, target: Path) -> None:
    """Gives a complete file its name, unless a file with this content has it already."""
    if not (target.exists() and filecmp.cmp(path, target, shallow=False)):
        _check_new(target)
        _move(path, target)


def _move(path: Path, target: Path) -> None:
    """Gives a complete file its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(path, target)
