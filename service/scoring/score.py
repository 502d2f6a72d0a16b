"""The command `bert-serve score`: windows of rows become parts, and at the end the parts become one file.

`part-00042` has the rows of window 42, and `part-00042.json` its counts and rejected rows. A file appears under its name when it is
complete. So a run that was killed continues with the parts that are missing, and gives the same bytes.
"""

from __future__ import annotations

import fcntl
import filecmp
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from bertserve.service import __version__
from bertserve.service.backend import sessions
from bertserve.service.backend.hardware import cpu_name
from bertserve.service.errors import SettingsError, StartError, classify, plural
from bertserve.service.scoring.columns import RowTask
from bertserve.service.scoring.predictor import Predictor
from bertserve.service.scoring.rows import (
    DelimitedReader,
    DelimitedWriter,
    JsonLinesReader,
    JsonLinesWriter,
    Reader,
    RowAnswer,
    Window,
    Writer,
)
from bertserve.service.settings import ModelSettings
from bertserve.service.wire.json_text import to_json

REJECTED = 3  # exit code of a finished run with rejected rows
STREAM = Path("-")
JSONL, PARQUET = "jsonl", "parquet"
DELIMITERS = {"csv": ",", "tsv": "\t"}
SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": "csv", ".tsv": "tsv", ".parquet": PARQUET}
_BAR = "{percentage:3.0f}%|{bar}| {postfix}, {elapsed} so far, {remaining} left"
_ENDLESS = "{postfix}, {elapsed} so far"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run, and how they are written.

    Attributes:
        source: The input; `-` is stdin.
        output: The output; `-` is stdout.
        formats: Format of the input and of the output; None to use its name, or for stdout the input's format.
        rejected: The file for rows without an answer; None to end at the first one.
        max_rejected: Maximum number of rows without an answer.
        json_cells: Whether predictions in CSV and TSV are always JSON, even those with one label.
        overwrite: Whether to replace existing files.
    """

    source: Path
    output: Path
    formats: tuple[str | None, str | None]
    rejected: Path | None
    max_rejected: int
    json_cells: bool
    overwrite: bool

    def actual_formats(self) -> tuple[str, str]:
        """Returns the formats of the input and of the output.

        Raises:
            SettingsError: They are unknown, or not possible.
        """
        source = _format(self.source, self.formats[0], "--input-format")
        output = _format(self.output, self.formats[1] or (source if self.output == STREAM else None), "--output-format")
        if self.json_cells and output not in DELIMITERS:
            raise SettingsError(f"--json-cells is for CSV and TSV, and the output is {output}; leave it out.")
        if source == JSONL != output:
            raise SettingsError(
                f"JSON Lines cannot be written as {output}, because their rows can have different columns; write JSON Lines."
            )
        return source, output

    def check_new(self, *written: Path) -> None:
        """Checks that the run can write files, by default all: it replaces no file without `overwrite`, and never its input or a device.

        Raises:
            SettingsError: It cannot.
        """
        if self.output == STREAM and sys.stdout is None:  # the process was started without it, as by `>&-`
            raise SettingsError("the output is stdout, which is closed; give a file.")
        if self.output == STREAM and self.source.is_file() and os.path.samestat(os.fstat(1), self.source.stat()):
            raise SettingsError("stdout is the input, so the run would never end; redirect it to another file.")
        paths = written or [path for path in (self.output, self.rejected) if path is not None and path != STREAM]
        if len({path.resolve() for path in (self.source, *paths)}) <= len(paths):
            raise SettingsError("input, output and --rejected are the same file; give another name.")
        for path in paths:
            if path.exists() and not path.is_file():
                raise SettingsError(f"`{path}` is not a regular file; give another name.")
            if path.exists() and not self.overwrite:
                raise SettingsError(f"`{path}` exists already; give --overwrite to replace it, or another name.")


def _format(path: Path, flag_value: str | None, flag: str) -> str:
    kind = flag_value or SUFFIXES.get(path.suffix.lower())
    if kind is None:
        what = "it is a stream" if path == STREAM else f"`{path.name}` ends with none of {', '.join(SUFFIXES)}"
        raise SettingsError(f"{flag} is missing: {what}; give one of jsonl, csv, tsv and parquet.")
    if kind == PARQUET and path == STREAM:
        raise SettingsError("Parquet needs a file, because its index is at the end; give a path instead of `-`, or another format.")
    return kind


@dataclass(slots=True)
class Counts:
    """The numbers of rows and of rows with warnings, and the lines about rejected rows; of a part or of all parts so far."""

    rows: int = 0
    warned: int = 0
    rejected: list[str] = field(default_factory=list)


class Parts:
    """The parts of an output file, in a folder whose name has a digest of everything that affects the bytes of the output."""

    def __init__(self, files: Files, facts: Any) -> None:
        """Opens the folder; it has the parts of an earlier run with the same `facts`, if that was stopped.

        Raises:
            SettingsError: The output exists.
            StartError: Another run is writing the parts.
        """
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self._files, self._folder = files, files.output.with_name(f"{files.output.name}.parts-{digest[:12]}")
        # if the folder exists, the output can be that of a run that was killed before it removed its parts; `finish` compares them
        if not self._folder.exists():
            files.check_new()
        self._folder.mkdir(exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another run is writing `{self._folder}`; wait for it, or choose another output.") from None

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("part-*") if not path.suffix)

    def counts(self, index: int) -> Counts | None:
        """Returns the counts of a part that exists; None if it does not."""
        part = self._folder / f"part-{index:05}"
        counts = part.with_suffix(".json")
        return Counts(**json.loads(counts.read_bytes())) if part.exists() and counts.exists() else None

    def write(self, index: int, data: bytes, counts: Counts) -> None:
        """Writes the part of a window."""
        part = self._folder / f"part-{index:05}"
        _write(part.with_suffix(".json"), json.dumps(asdict(counts)).encode())
        _write(part, data)

    def finish(self, counts: Counts, writer: Writer) -> None:
        """Writes the output and the file of rejected rows, and removes the parts.

        Raises:
            SettingsError: A file exists that another program has written meanwhile.
            StartError: No row has an answer, and the output would replace a file.
        """
        output, rejected = self._files.output, self._files.rejected
        assert rejected is not None, "only stdout has no file for rejected rows"
        if 0 < counts.rows == len(counts.rejected) and output.exists():
            raise StartError(f"no row has an answer, so `{output}` was not replaced; the first row: {counts.rejected[0]}")
        made, made_rejected = self._folder / "output", self._folder / "rejected"
        writer.join(self._paths(), made)
        made_rejected.write_text("".join(counts.rejected), encoding="utf-8")
        for path, target in ((made_rejected, rejected), (made, output)):
            if not target.exists() or not filecmp.cmp(path, target, shallow=False):
                self._files.check_new(target)
                _sync(path)
                os.replace(path, target)
        if not counts.rejected:
            rejected.unlink()
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Unlocks the folder, and removes it if it is empty."""
        os.close(self._lock)
        with suppress(OSError):
            self._folder.rmdir()


def _write(path: Path, data: bytes) -> None:
    """Writes a file that appears when it is complete."""
    made = path.with_name("." + path.name)
    made.write_bytes(data)
    _sync(made)
    os.replace(made, path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def score(settings: ModelSettings, task: RowTask, files: Files) -> int:
    """Scores an input with the settings of one model; returns the exit code.

    Raises:
        StartError: Flags, files or the model are wrong, or too many rows were rejected; the message says what to do.
    """
    files.actual_formats()  # before the model is loaded, because it may be wrong
    try:
        with (
            open(0, "rb", closefd=False) if files.source == STREAM else files.source.open("rb") as file,
            Predictor(settings, task) as predictor,
        ):
            return _score(settings, predictor, task, files, file)
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of stdout is gone
        raise
    except OSError as error:
        name = f"`{error.filename}`" if error.filename else "a file"
        raise StartError(f"{name} cannot be read or written ({error.strerror}); fix that, and run the same command again.") from error


def _score(settings: ModelSettings, predictor: Predictor, task: RowTask, files: Files, file: BinaryIO) -> int:
    identity = _identity(files.source)
    source_format, output_format = files.actual_formats()
    names = task.names
    if output_format in DELIMITERS and not files.json_cells and predictor.columns.spec.has_one_label(task.parameters, predictor.manifest):
        names = (f"{names[0]}_label", f"{names[0]}_score", names[1])
    reader = _reader(files.source, file, source_format, settings.max_body_bytes, predictor, names, whole=output_format != PARQUET)
    writer = _writer(output_format, reader, names, json_cells=files.json_cells)
    facts = [
        [identity, source_format, output_format, files.json_cells, names],
        [predictor.version, predictor.graph.file, predictor.graph.provider, predictor.batch_tokens, predictor.window_rows],
        [__version__, sessions.VERSION, cpu_name()],
        [predictor.columns.name, predictor.columns.by_field, task.parameters, task.empty],
        [settings.max_chars, settings.max_inputs, settings.max_body_bytes, settings.batch_variant_graphs],
    ]
    if files.output == STREAM:
        files.check_new()
        if files.rejected is not None:
            files.rejected.write_bytes(b"")
        _print(writer.head)
        return REJECTED if _run(files, predictor, reader, writer, None).rejected else 0
    parts = Parts(files, facts)
    try:
        counts = _run(files, predictor, reader, writer, parts)
        if files.source.is_file() and _identity(files.source) != identity:
            raise StartError(f"the input `{files.source}` changed during the run; start again.")
        parts.finish(counts, writer)
        return REJECTED if counts.rejected else 0
    finally:
        parts.close()


def _print(data: bytes) -> None:
    while data:  # without a buffer, which a thread that waits for the reader would lock
        data = data[os.write(1, data) :]


def _run(files: Files, predictor: Predictor, reader: Reader, writer: Writer, parts: Parts | None) -> Counts:
    counts, scored, start = Counts(), 0, time.perf_counter()
    with tqdm(total=reader.total, leave=False, disable=None, bar_format=_ENDLESS if reader.total is None else _BAR) as bar:
        for index, window, pending in _windows(reader, predictor, parts):
            part = pending if isinstance(pending, Counts) else _write_part(files, index, window, pending(), writer, parts)
            scored += 0 if part is pending else part.rows
            counts = Counts(counts.rows + part.rows, counts.warned + part.warned, counts.rejected + part.rejected)
            if len(counts.rejected) > files.max_rejected:
                raise StartError(
                    f"{plural(len(counts.rejected), 'row')} up to row {counts.rows} cannot be answered, and --max-rejected is "
                    f"{files.max_rejected}. The first of these rows: {counts.rejected[0].strip()} Fix the input or the flags, or raise "
                    "--max-rejected and run the same command again."
                )
            bar.set_postfix_str(f"{scored / (time.perf_counter() - start):,.0f} rows/s", refresh=False)
            bar.update(window.position - bar.n)
    seconds = time.perf_counter() - start
    print(
        f"{plural(counts.rows, 'row')}: {counts.rows - len(counts.rejected)} answered, {counts.warned} of them with warnings"
        + (f", {len(counts.rejected)} rejected ({files.rejected})" if counts.rejected else "")
        + f"; {scored} scored in {seconds:.1f} s, {scored / seconds:,.0f} rows/s",
        file=sys.stderr,
    )
    return counts


_Pending = Callable[[], Sequence[RowAnswer]]


def _windows(reader: Reader, predictor: Predictor, parts: Parts | None) -> Iterator[tuple[int, Window, Counts | _Pending]]:
    """Yields each window with the counts of its part, or with its answers. The next window starts while the last rows of a window run."""
    waiting: deque[tuple[int, Window, Counts | _Pending]] = deque()
    for index, window in enumerate(reader.windows(predictor.window_rows)):
        waiting.append((index, window, (parts and parts.counts(index)) or predictor.start(window.rows)))
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def _write_part(files: Files, index: int, window: Window, answers: Sequence[RowAnswer], writer: Writer, parts: Parts | None) -> Counts:
    """Writes a window; returns its counts."""
    counts = Counts(len(answers), sum(bool(answer.warnings) and answer.error is None for answer in answers))
    for row, answer in zip(window.rows, answers, strict=True):
        if answer.error is not None:
            line = {} if row.line is None else {"line": row.line}
            facts = {"row": row.number, **line, "error": answer.error.message, "error_type": classify(answer.error)[1]}
            counts.rejected.append(to_json(facts).decode() + "\n")
    if counts.rejected and files.rejected is None:
        raise StartError(f"a row cannot be answered: {counts.rejected[0].strip()} To continue without such rows, give --rejected FILE.")
    data = writer.write(window, answers)
    if parts is not None:
        parts.write(index, data, counts)
        return counts
    if files.rejected is not None:
        with files.rejected.open("a", encoding="utf-8") as file:
            file.writelines(counts.rejected)
    _print(data)
    return counts


def _reader(path: Path, file: BinaryIO, kind: str, max_bytes: int, predictor: Predictor, added: Sequence[str], *, whole: bool) -> Reader:
    """Returns the reader of the input; `added` are the columns that the output adds, and `whole` is as for Parquet.

    Raises:
        StartError: The input lacks a required column, or would have a column twice with those that the output adds.
    """
    reader: Reader
    total = path.stat().st_size if path.is_file() else None
    if kind == PARQUET:
        from bertserve.service.scoring.parquet import ParquetReader

        reader = ParquetReader(path, list(predictor.columns.by_field.values()), whole=whole)
    elif kind == JSONL:
        reader = JsonLinesReader(file, total, max_bytes)
        reader.added = added
    else:
        reader = DelimitedReader(file, total, max_bytes, DELIMITERS[kind])
    if reader.columns is not None:
        predictor.columns.check(reader.columns, reader.header)
    ((name, count),) = Counter([*(reader.columns or ()), *added]).most_common(1)
    if count > 1:
        raise SettingsError(
            f"the output would have the column `{name[:64]}` twice; rename it, or set --prediction-column or --warnings-column."
        )
    return reader


def _writer(kind: str, reader: Reader, names: Sequence[str], *, json_cells: bool) -> Writer:
    if kind == PARQUET:
        from bertserve.service.scoring.parquet import ParquetWriter

        return ParquetWriter(reader, names)
    if kind == JSONL:
        return JsonLinesWriter(names)
    return DelimitedWriter(reader.columns or (), names, DELIMITERS[kind], json_cells=json_cells)


def _identity(path: Path) -> Sequence[int]:
    """Returns size and time of the last change of the input; for a stream, which cannot be read twice, a unique number."""
    if not path.is_file():
        return [time.time_ns()]
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
