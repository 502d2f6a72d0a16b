"""The command `bert-serve score`: windows of rows become parts, and at the end the parts become one file.

`part-00042` has the rows of window 42 that have an answer, and `rejected-00042` a line about each of the others. A file appears under its
name when it is complete. So a run that was killed continues with the parts that are missing, and gives the same bytes. A `StartError` ends
the run.
"""

from __future__ import annotations

import fcntl
import filecmp
import hashlib
import os
import shutil
import signal
import sys
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bertserve.service import __version__
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import cpu_name
from bertserve.service.errors import BertServeError, SettingsError, StartError, classify, plural
from bertserve.service.scoring import rows
from bertserve.service.scoring.columns import RowTask
from bertserve.service.scoring.predictor import Predictor
from bertserve.service.settings import ModelSettings
from bertserve.service.tasks.json_text import to_json

REJECTED = 3  # exit code of a finished run with rejected rows
STREAM = Path("-")
JSONL, PARQUET = "jsonl", "parquet"
DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run, and their formats: `jsonl`, `csv`, `tsv` or `parquet`."""

    source: Path  # `-` is stdin
    output: Path  # `-` is stdout
    formats: tuple[str, str]  # of the input and of the output
    rejected: Path | None  # for the reasons why rows have no answer; None to end at the first one
    max_rejected: int
    overwrite: bool

    def check_new(self, *paths: Path | None) -> None:
        """Checks that the run can write files: it replaces none without `overwrite`, and never its input or a device."""
        files = [path for path in paths if path is not None and path != STREAM]
        if STREAM in paths and (sys.stdout is None or (self.source.is_file() and os.path.samestat(os.fstat(1), self.source.stat()))):
            raise SettingsError("stdout is closed, or is the input, so that the run would never end; give a file.")
        if len({path.resolve() for path in (self.source, *files)}) <= len(files):
            raise SettingsError("input, output and --rejected are the same file; give another name.")
        for path in files:
            if path.exists() and not (self.overwrite and path.is_file()):
                raise SettingsError(f"`{path}` exists already; give another name, or --overwrite to replace it if it is a regular file.")


class Parts:
    """The parts of an output file, in a folder whose name has a digest of everything that affects the bytes of the output."""

    def __init__(self, files: Files, facts: Any) -> None:
        """Opens the folder; it has the parts of an earlier run with the same `facts`, if that was stopped."""
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        self._files, self._folder = files, files.output.with_name(f"{files.output.name}.parts-{digest}")
        # if the folder exists, the output can be that of a run that was killed before it removed its parts; `finish` compares them
        if not self._folder.exists():
            files.check_new(files.output, files.rejected)
        self._folder.mkdir(exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another run is writing `{self._folder}`; wait for it, or choose another output.") from None

    def close(self) -> None:
        """Unlocks the folder, and removes it if it is empty."""
        os.close(self._lock)
        with suppress(OSError):
            self._folder.rmdir()

    def _paths(self, index: int) -> tuple[Path, Path]:
        return self._folder / f"part-{index:05}", self._folder / f"rejected-{index:05}"

    def known(self, windows: Iterable[rows.Window]) -> Iterator[rows.Window]:
        """Yields windows; those whose part exists get its lines about rejected rows."""
        for index, window in enumerate(windows):
            part, rejected = self._paths(index)
            if part.exists() and rejected.exists():
                window.rejected = rejected.read_bytes()
            yield window

    def write(self, index: int, data: bytes, rejected: bytes) -> None:
        """Writes the part of a window."""
        for path, content in zip(self._paths(index)[::-1], (rejected, data), strict=True):
            made = path.with_name("." + path.name)
            made.write_bytes(content)
            _move(made, path)

    def finish(self, count: int, writer: rows.Writer) -> None:
        """Joins the parts to the output and to the file of rejected rows, and removes them."""
        paths, output, rejected = [*map(self._paths, range(count))], self._folder / "output", self._folder / "rejected"
        writer.join([part for part, _ in paths], output)
        rows.Writer().join([lines for _, lines in paths], rejected)
        for made, target in ((rejected, self._files.rejected), (output, self._files.output)):
            if target is not None and not (target.exists() and filecmp.cmp(made, target, shallow=False)):
                self._files.check_new(target)
                _move(made, target)
        if self._files.rejected is not None and not self._files.rejected.stat().st_size:
            self._files.rejected.unlink()
        shutil.rmtree(self._folder)


def _move(made: Path, target: Path) -> None:
    """Gives a complete file its name."""
    with made.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(made, target)


def score(settings: ModelSettings, task: RowTask, files: Files) -> int:
    """Scores an input with the settings of one model; returns the exit code."""
    try:
        with (
            open(0, "rb", closefd=False) if files.source == STREAM else files.source.open("rb") as file,
            closing(Predictor(settings, task)) as predictor,
        ):
            return REJECTED if _score(settings, predictor, task, files, file) else 0
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of stdout is gone
        raise
    except OSError as error:
        name = f"`{error.filename}`" if error.filename else "a file"
        raise StartError(f"{name} cannot be read or written ({error.strerror}); fix that, and run the same command again.") from error


def _score(settings: ModelSettings, predictor: Predictor, task: RowTask, files: Files, file: BufferedReader) -> int:
    """Returns the number of rejected rows."""
    identity, formats, names = _identity(files.source), files.formats, task.names
    if formats[1] in DELIMITERS and predictor.columns.spec.has_one_label(task.parameters, predictor.manifest):
        names = (f"{names[0]}_label", f"{names[0]}_score", names[1])
    windows, writer = _open(files, file, settings.max_body_bytes, predictor, names)
    if files.output == STREAM:
        files.check_new(STREAM, files.rejected)
        if files.rejected is not None:
            files.rejected.write_bytes(b"")
        _print(writer.head, b"", files.rejected)
        return _run(files, predictor, windows, writer, None)["rejected"]
    facts = (
        (identity, formats, names, task, predictor.columns.spec.name),
        (settings.max_chars, settings.max_inputs, settings.max_body_bytes, settings.batch_variant_graphs),
        (predictor.version, predictor.graph.file, predictor.graph.provider, predictor.batch_tokens, predictor.window_rows),
        (__version__, sessions.VERSION, cpu_name()),
    )
    with closing(Parts(files, facts)) as parts:
        totals = _run(files, predictor, windows, writer, parts)
        if files.source.is_file() and _identity(files.source) != identity:
            raise StartError(f"the input `{files.source}` changed during the run; start again.")
        parts.finish(totals["windows"], writer)
        return totals["rejected"]


def _identity(path: Path) -> Sequence[int]:
    """Returns size and time of the last change of the input; for a stream, which cannot be read twice, a unique number."""
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else [time.time_ns()]


def _open(
    files: Files, file: BufferedReader, max_bytes: int, predictor: Predictor, names: Sequence[str]
) -> tuple[Iterable[rows.Window], rows.Writer]:
    """Returns the windows of the input, and the writer of the output, which adds the columns `names`."""
    source_format, output_format = files.formats
    if file.peek(3).startswith(BOM_UTF8):
        file.read(3)
    if source_format == JSONL:
        return rows.windows_of(rows.read_json_lines(file, max_bytes, names), predictor.window_rows), rows.JsonLinesWriter(names)
    if source_format == PARQUET:
        from bertserve.service.scoring.parquet import read_parquet

        inputs = [*predictor.columns.by_field.values()] if output_format == PARQUET else None
        schema, windows = read_parquet(files.source, inputs, predictor.window_rows)
        columns = schema.names
    else:
        schema, (columns, lines) = None, rows.read_delimited(file, DELIMITERS[source_format], max_bytes)
        windows = rows.windows_of(lines, predictor.window_rows)
    predictor.columns.check(columns, names)
    if output_format == PARQUET:
        from bertserve.service.scoring.parquet import ParquetWriter

        return windows, ParquetWriter(schema, columns, names)
    return windows, rows.JsonLinesWriter(names) if output_format == JSONL else rows.DelimitedWriter(
        columns, names, DELIMITERS[output_format]
    )


def _run(files: Files, predictor: Predictor, windows: Iterable[rows.Window], writer: rows.Writer, parts: Parts | None) -> Counter[str]:
    """Scores all windows; returns the numbers of windows, rows, and rows that were scored by this run, with warnings, or rejected."""
    totals, first, start = Counter[str](), "", time.perf_counter()
    size = files.source.stat().st_size if files.source.is_file() else None
    with tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for window in predictor.answered(windows if parts is None else parts.known(windows)):
            if window.rejected is None:
                window.rejected = b"".join(_reason(row, row.error) for row in window.rows if row.error is not None)
                totals.update(scored=len(window.rows), warned=sum(bool(row.warnings) for row in window.rows if row.error is None))
                if parts is not None:
                    parts.write(totals["windows"], writer.write(window), window.rejected)
                elif files.rejected is not None or not window.rejected:
                    _print(writer.write(window), window.rejected, files.rejected)
            totals.update(windows=1, rows=len(window.rows), rejected=window.rejected.count(b"\n"))
            first = first or window.rejected.partition(b"\n")[0].decode()
            if totals["rejected"] > (0 if files.rejected is None else files.max_rejected):
                raise StartError(
                    f"{plural(totals['rejected'], 'row')} up to row {totals['rows']} cannot be answered. The first of these rows: {first} "
                    "Fix the input or the flags, or give --rejected FILE or raise --max-rejected, and run the same command again."
                )
            bar.set_postfix_str(f"{totals['scored'] / (time.perf_counter() - start):,.0f} rows/s", refresh=False)
            bar.update(sum(row.size for row in window.rows))
    if 0 < totals["rows"] == totals["rejected"] and files.output.exists():
        raise StartError(f"no row has an answer, so `{files.output}` was not replaced; the first row: {first}")
    seconds = time.perf_counter() - start
    rejected = f", {totals['rejected']} rejected ({files.rejected})" if totals["rejected"] else ""
    print(
        f"{plural(totals['rows'], 'row')}: {totals['rows'] - totals['rejected']} answered{rejected}; {totals['scored']} scored in "
        f"{seconds:.1f} s, {totals['scored'] / seconds:,.0f} rows/s, {totals['warned']} with warnings",
        file=sys.stderr,
    )
    return totals


def _reason(row: rows.Row, error: BertServeError) -> bytes:
    return to_json({"row": row.number, "line": row.line, "error": error.message, "error_type": classify(error)[1]}) + b"\n"


def _print(data: bytes, rejected: bytes, path: Path | None) -> None:
    """Writes to stdout, and rejected rows to their file."""
    if path is not None:
        with path.open("ab") as file:
            file.write(rejected)
    while data:  # without a buffer, which a thread that waits for the reader would lock
        data = data[os.write(1, data) :]
