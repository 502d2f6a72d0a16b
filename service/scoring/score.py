"""The command `bert-serve score`: reads a file in blocks, and writes a file with a prediction for each row.

Each block becomes a part: `part-00042` contains the answered rows of block 42, and `rejected-00042` a line about each of the others.
At the end, the parts become one file, and each file is complete when it appears. So a run that was killed continues with the same bytes.
"""

import filecmp
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bertserve.service import __version__
from bertserve.service.body.json_text import to_json
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import cpu_name
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.messages import plural
from bertserve.service.scoring import rows
from bertserve.service.scoring.predictor import Predictor
from bertserve.service.settings import ScoreSettings


def score(settings: ScoreSettings, source: Path, output: Path, rejected: Path, formats: tuple[str, str], max_rejected: int) -> int:
    """Scores the rows of `source`, and writes the answered ones, and the reasons for rejecting the others; returns the exit code.

    `formats` are the input's and the output's: `jsonl`, `csv`, `tsv` or `parquet`. More than `max_rejected` rows stop the run.

    Raises:
        StartError: A setting or the input is wrong, or a file cannot be read or written.
    """
    try:
        source_stat = source.stat()  # first, because loading the model can take minutes
        with closing(Predictor(settings)) as predictor:
            reader, names, delimiter = predictor.reader, list(settings.added_columns), rows.DELIMITERS.get(formats[1], "")
            if delimiter and reader.has_one_label and not settings.json_cells:
                names[:1] = f"{names[0]}_label", f"{names[0]}_score"
            columns, blocks = rows.read_blocks(source, formats, reader.column_by_input.values(), names, reader.block_rows)
            if formats[0] != "jsonl":
                reader.check(columns, names)
            line_writer = rows.LineWriter(columns, names, delimiter, settings.json_cells)
            writer = rows.ParquetWriter(columns, names) if formats[1] == "parquet" else line_writer
            facts = (
                (source_stat.st_size, source_stat.st_mtime_ns, formats, settings.affecting_answers()),
                (predictor.version, predictor.graph.file, predictor.graph.provider, __version__, sessions.VERSION, cpu_name()),
            )
            parts = Parts(output, rejected, max_rejected, writer, facts)
            try:
                return _run(source, source_stat, predictor, blocks, parts)
            except (KeyboardInterrupt, SystemExit):  # SIGINT, SIGTERM
                print(f"stopped after {plural(parts.rows, 'row')}; run the same command again.", file=sys.stderr)
                raise
    except OSError as error:
        name = f"`{error.filename}`" if error.filename else "a file"
        raise StartError(f"{name} cannot be read or written ({error.strerror}); fix that, and run the same command again.") from error


def _run(source: Path, source_stat: os.stat_result, predictor: Predictor, blocks: Iterable[rows.RowBlock], parts: "Parts") -> int:
    """Scores all blocks, and returns the exit code, which is 3 if rows were rejected."""
    scored, warned, start = 0, 0, time.perf_counter()
    blocks_in_progress = ((i, block, predictor.answer_rows(block.rows) if i >= parts.written else ()) for i, block in enumerate(blocks))
    next_block = next(blocks_in_progress, None)
    with tqdm(total=source_stat.st_size or None, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while next_block is not None:
            (index, block, answers), next_block = next_block, next(blocks_in_progress, None)  # starts it, so that threads are never idle
            list(answers)  # until all rows of the block are answered
            if index >= parts.written:
                parts.write(index, block)
                scored += len(block.rows)
                warned += sum(bool(row.warnings) for row in block.rows if row.error is None)
            parts.rows += len(block.rows)
            bar.update(block.size)
    seconds, after = time.perf_counter() - start, source.stat()
    if source.is_file() and (source_stat.st_size, source_stat.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise StartError(f"the input `{source}` changed during the run; run the same command again.")
    reasons = parts.finish(index + 1)
    rejected = f", {len(reasons)} rejected ({parts.rejected})" if reasons else ""
    print(
        f"{plural(parts.rows, 'row')}: {parts.rows - len(reasons)} answered{rejected}; "
        f"{scored} scored in {seconds:.1f} s, {scored / seconds:,.0f} rows/s, {warned} with warnings",
        file=sys.stderr,
    )
    if reasons:
        print("first rejection, row {row}: {error}".format(**json.loads(reasons[0])), file=sys.stderr)
    return 3 if reasons else 0


class Parts:
    """The parts of an output file, in a folder whose name contains a digest of everything that affects the bytes of the output."""

    def __init__(self, output: Path, rejected: Path, max_rejected: int, writer: rows.LineWriter | rows.ParquetWriter, facts: Any) -> None:
        """Finds the parts of an earlier run with the same `facts` that was stopped; without them, `output` and `rejected` must be new."""
        self.output, self.rejected, self._max_rejected, self._writer = output, rejected, max_rejected, writer
        self._folder = output.with_name(f"{output.name}.parts-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}")
        if output.resolve() == rejected.resolve():
            raise SettingsError("the output and --rejected are the same file; give another name.")
        for path in (output, rejected):
            # the files of a run that was killed before it removed its parts are checked at the end
            if os.path.lexists(path) and not self._folder.exists():
                raise SettingsError(f"`{path}` exists already; remove it, or give another name.")
        self.rows = 0  # number of rows in the complete parts
        self.written = next(n for n in count() if not all(self._path(kind, n).exists() for kind in ("part", "rejected")))
        self._rejected_rows = sum(self._path("rejected", index).read_bytes().count(b"\n") for index in range(self.written))

    def _path(self, kind: str, index: int) -> Path:
        return self._folder / f"{kind}-{index:05}"

    def write(self, index: int, block: rows.RowBlock) -> None:
        """Writes the part of the next block: its answered rows, and a line for each of the others."""
        part = self._writer.write(block, self._path("part", index - 1) if index else None)  # it can reject rows
        reasons = [
            {"row": number, "line": row.line, "error": row.error.message, "error_type": row.error.error_type}
            for number, row in enumerate(block.rows, self.rows + 1)
            if row.error is not None
        ]
        self._rejected_rows += len(reasons)
        if reasons and self._rejected_rows > self._max_rejected:
            raise StartError(
                f"rejected rows: {self._rejected_rows}, over --max-rejected; row {reasons[0]['row']} because: {reasons[0]['error']} "
                "Fix --columns, --parameters or the rows, or raise --max-rejected (for stdout, give --rejected), and run it again."
            )
        for kind, content in (("rejected", b"".join(to_json(reason) + b"\n" for reason in reasons)), ("part", part)):
            with self._complete(kind, self._path(kind, index)) as path:
                path.write_bytes(content)

    def finish(self, part_count: int) -> list[bytes]:
        """Joins `part_count` parts to the output, and to the file of rejected rows if there are any; returns the lines about these rows."""
        with self._complete("output", self.output) as output:
            self._writer.join([self._path("part", index) for index in range(part_count)], output)
            reasons = b"".join(self._path("rejected", index).read_bytes() for index in range(part_count))
            if reasons:
                with self._complete("rejected", self.rejected) as rejected:
                    rejected.write_bytes(reasons)
        shutil.rmtree(self._folder)
        return reasons.splitlines()

    @contextmanager
    def _complete(self, kind: str, target: Path) -> Iterator[Path]:
        """Yields the path of a new file, which becomes `target` when it is complete, unless `target` exists with another content."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f".{kind}-{os.getpid()}"  # a name that no other run uses
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())
        if not os.path.lexists(target):
            os.replace(path, target)
        elif not filecmp.cmp(path, target, shallow=False):
            raise SettingsError(f"`{target}` exists already; remove it, or give another name.")
