"""The command `bert-serve score`: reads a file in blocks, and writes a file with a prediction for each row."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from bertserve.service import __version__
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import cpu_name
from bertserve.service.errors import SettingsError, StartError, install_command, plural
from bertserve.service.scoring import parts, rows
from bertserve.service.scoring.predictor import Predictor, RowTask
from bertserve.service.settings import ModelSettings

STDOUT = Path("-")


def score(settings: ModelSettings, task: RowTask, source: Path, output: Path, rejected: Path, formats: tuple[str, str]) -> int:
    """Scores the rows of `source`, and writes those with an answer and the reasons why others have none; returns the exit code.

    `formats` are those of the input and of the output: `jsonl`, `csv`, `tsv` or `parquet`.

    Raises:
        StartError: A setting or the input is wrong, or a file cannot be read or written.
    """
    try:
        with closing(Predictor(settings, task)) as predictor:
            names = task.names
            if formats[1] in rows.DELIMITERS and predictor.reader.spec.has_one_label(task.parameters, predictor.manifest):
                names = (f"{names[0]}_label", f"{names[0]}_score", names[1])
            blocks, writer = _open(source, formats, predictor, names)
            facts = (
                (source.stat().st_size, source.stat().st_mtime_ns, formats, names, task, predictor.reader.spec.name),
                (settings.max_chars, settings.max_inputs, settings.batch_variant_graphs),
                (predictor.version, predictor.graph.file, predictor.graph.provider, predictor.batch_tokens, predictor.block_rows),
                (__version__, sessions.VERSION, cpu_name()),
            )
            if isinstance(writer, parts.LineWriter) and output == STDOUT:
                return _run(source, predictor, blocks, parts.Stream(writer))
            run = parts.Parts(output, rejected, writer, facts)
            return _run(source, predictor, run.mark_written(blocks), run)
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        raise
    except OSError as error:
        name = f"`{error.filename}`" if error.filename else "a file"
        raise StartError(f"{name} cannot be read or written ({error.strerror}); fix that, and run the same command again.") from error


def _open(
    source: Path, formats: tuple[str, str], predictor: Predictor, names: Sequence[str]
) -> tuple[Iterable[rows.RowBlock], parts.LineWriter | parts.ParquetWriter]:
    """Returns the blocks of the input, and the writer of the output, which adds the columns `names`."""
    if "parquet" in formats and find_spec("pyarrow") is None:
        raise SettingsError(f"Parquet needs pyarrow, which is not installed; `{install_command('parquet')}` adds it.")
    columns: Sequence[str] = ()
    if formats[0] == "parquet":
        inputs = predictor.reader.by_field.values() if formats[1] == "parquet" else None
        schema, blocks = rows.read_parquet(source, inputs, predictor.block_rows)
        columns = schema.names
    else:
        if formats[0] == "jsonl":
            lines = rows.read_json_lines(source, names)
        else:
            columns, lines = rows.read_delimited(source, rows.DELIMITERS[formats[0]])
        schema, blocks = columns, rows.blocks_of(lines, predictor.block_rows)
    if formats[0] != "jsonl":
        predictor.reader.check(columns, names)
    if formats[1] == "parquet":
        return blocks, parts.ParquetWriter(schema, names)
    if formats[1] == "jsonl":
        return blocks, parts.LineWriter(lambda row: parts.json_line(row, names), head=b"")
    encoded = partial(parts.delimited_line, delimiter=rows.DELIMITERS[formats[1]])

    def line(row: rows.Row) -> bytes:
        answer = (row.prediction[0]["label"], row.prediction[0]["score"]) if len(names) == 3 else (row.prediction,)
        return encoded([*row.values.values(), *answer, " | ".join(row.warnings)])

    return blocks, parts.LineWriter(line, head=encoded([*columns, *names]))


def _run(source: Path, predictor: Predictor, blocks: Iterable[rows.RowBlock], run: parts.Parts | parts.Stream) -> int:
    """Scores all blocks, and returns the exit code, which is 3 if rows were rejected."""
    totals, start = Counter[str](), time.perf_counter()
    with tqdm(total=source.stat().st_size or None, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for index, block in enumerate(predictor.answer(blocks)):
            if not block.is_written:
                run.write(index, block)
                totals.update(scored=len(block.rows), warned=sum(bool(row.warnings) for row in block.rows if row.error is None))
            totals.update(blocks=1, rows=len(block.rows))
            bar.update(block.size)
    seconds = time.perf_counter() - start
    rejected = run.finish(totals["blocks"])
    print(
        f"{plural(totals['rows'], 'row')}: {totals['rows'] - rejected} answered{f', {rejected} rejected ({run.rejected})' if rejected else ''}; "
        f"{totals['scored']} scored in {seconds:.1f} s, {totals['scored'] / seconds:,.0f} rows/s, {totals['warned']} with warnings",
        file=sys.stderr,
    )
    return 3 if rejected else 0
