"""The command `bert-serve score`: flags to a run, and a run to an exit code. The composition root of offline scoring."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.service import __version__
from bertserve.service.errors import BertServeError, StartError
from bertserve.service.scoring.columns import Columns, read_parameters, task_for
from bertserve.service.scoring.distinct_files import check_distinct, check_stream, refuse_existing
from bertserve.service.scoring.formats import PARQUET, STREAM, Reader, format_of, make_writer, open_reader, total_size
from bertserve.service.scoring.part import Part, Progress, identity_of
from bertserve.service.scoring.progress import ProgressBar
from bertserve.service.scoring.row import Place
from bertserve.service.scoring.runner import WINDOW_BYTES, WINDOW_ROWS, Run, Sink
from bertserve.service.scoring.scorer import Scorer
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.model import Model
from bertserve.service.settings import Settings

REJECTED = 3  # exit code of a run that is done, and has rows without an answer


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be scored, and how.

    Attributes:
        source: The input, or `-`.
        output: The output, or `-`.
        input_format: Of the input; None goes by its name.
        output_format: Of the output; None goes by its name, and else by the input's.
        task: Which of the model's tasks; None for its own, or the one that parameters or columns show.
        columns: Field of the task -> column.
        parameters: JSON object, as the endpoint takes it.
        names: Of the columns for predictions and warnings.
        rejected: The file of rows without an answer; None is one beside the output.
        max_rejected: How many there may be.
        restart: Whether to begin again, and to replace the output, its part and the file of rejected rows.
    """

    source: Path
    output: Path
    input_format: str | None
    output_format: str | None
    task: str | None
    columns: Mapping[str, str]
    parameters: str
    names: tuple[str, str]
    rejected: Path | None
    max_rejected: int
    restart: bool


class Stream:
    """Stdout as an output, which nothing can go on with."""

    def __init__(self, rejected: Path | None, *, restart: bool) -> None:
        """Makes the file of rejected rows, if there is to be one.

        Args:
            rejected: The file.
            restart: Whether it replaces one that is there.

        Raises:
            SettingsError: There is such a file.
            StartError: It cannot be written.
        """
        self._rejected = rejected
        if rejected is None:
            return
        if not restart and (not rejected.exists() or rejected.is_file()):  # a device or a pipe has nothing to lose
            refuse_existing(rejected, flag="--rejected")
        try:
            rejected.write_bytes(b"")
        except OSError as error:
            raise StartError(f"`{rejected}` cannot be written ({error.strerror}).") from error

    def append(self, data: bytes, rejected: bytes, progress: Progress) -> Progress:
        """Writes both."""
        if self._rejected is not None and rejected:
            with self._rejected.open("ab") as file:
                file.write(rejected)
        with suppress(ValueError):  # stdout was closed
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return progress


def score(settings: Settings, order: Order) -> int:
    """Scores an input; returns the exit code.

    Args:
        settings: With one model.
        order: What to score.

    Raises:
        StartError: Flags, files or the model are wrong, or too many rows are; the message says what to do.
    """
    parameters = read_parameters(order.parameters)
    kind = format_of(order.source, order.input_format, "--input-format")
    out_kind = order.output_format or (kind if order.output == STREAM else format_of(order.output, None, "--output-format"))
    format_of(order.output, out_kind, "--output-format")
    _check_files(order)
    if order.source != STREAM:
        identity_of(order.source)  # before the model is loaded: it may be a wrong name
    try:
        return _score_with(settings, order, parameters, (kind, out_kind))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _check_files(order: Order) -> None:
    """Checks that the run writes into no file that it reads, nor twice into one.

    Raises:
        SettingsError: It would.
    """
    files = {} if order.source == STREAM else {"the input": order.source}
    if order.output != STREAM:
        check_distinct(files | Part(order.output, _rejected_beside(order), {}).files())
        return
    if order.rejected is not None:
        files["--rejected"] = order.rejected
    check_distinct(files)
    check_stream(sys.stdout, files)


def _rejected_beside(order: Order) -> Path:
    """Returns the file of rejected rows of an output that is a file."""
    return order.rejected or order.output.with_name(order.output.name + ".rejected.jsonl")


def _score_with(settings: Settings, order: Order, parameters: Mapping[str, Any], kinds: tuple[str, str]) -> int:
    """Loads the model and scores; returns the exit code."""
    state = build(settings)
    (model,) = state.registry.models.values()
    task = task_for(model.tasks, order.task, parameters, order.columns)
    columns = Columns(task, order.columns, parameters, state.limits)
    lanes = state.worker["lanes"]
    scorer = Scorer(model, columns, lanes=lanes, max_batch_tokens=settings.max_batch_tokens, taken=order.names)
    return asyncio.run(_run(state, model, order, scorer, columns, kinds, parameters))


async def _run(
    state: AppState,
    model: Model,
    order: Order,
    scorer: Scorer,
    columns: Columns,
    kinds: tuple[str, str],
    parameters: Mapping[str, Any],
) -> int:
    part, rejected = None, order.rejected
    if order.source != STREAM:
        _check_columns(state, order, columns, kinds)
    if order.output != STREAM:
        rejected = _rejected_beside(order)
        part = Part(order.output, rejected, _facts(state, model, order, scorer, columns, kinds, parameters))
    progress = Progress() if part is None else part.open(restart=order.restart)
    try:
        if part is not None and part.is_named(progress):
            part.tidy(progress)
            return _end(progress, 0, 0.0, rejected)
        return await _score(state, order, scorer, columns, kinds, part=part, progress=progress, rejected=rejected)
    finally:
        if part is not None:
            part.close()


def _check_columns(state: AppState, order: Order, columns: Columns, kinds: tuple[str, str]) -> None:
    """Checks that the input has the columns that are to be read, before a file is made, truncated or replaced.

    Raises:
        SettingsError: It does not.
    """
    reader = _open(state, order, columns, kinds, Place())
    try:
        if reader.columns is not None:
            columns.check(reader.columns, order.names)
    finally:
        reader.close()


def _open(state: AppState, order: Order, columns: Columns, kinds: tuple[str, str], place: Place) -> Reader:
    """Returns what reads the input from a place on."""
    return open_reader(
        order.source,
        kinds[0],
        place,
        max_bytes=state.max_body_bytes,
        inputs=list(columns.by_field.values()),
        whole=kinds[1] != PARQUET,  # Parquet's own columns go to Parquet as they are
    )


async def _score(
    state: AppState,
    order: Order,
    scorer: Scorer,
    columns: Columns,
    kinds: tuple[str, str],
    *,
    part: Part | None,
    progress: Progress,
    rejected: Path | None,
) -> int:
    """Scores from where the progress is; returns the exit code."""
    sink: Sink = Stream(rejected, restart=order.restart) if part is None else part
    reader = _open(state, order, columns, kinds, progress.place)
    try:
        writer = make_writer(kinds[1], reader, columns.task, order.names, known=b"" if part is None else part.head())
        if reader.columns is not None:
            columns.check(reader.columns, order.names)
        bar = ProgressBar(total_size(order.source, reader), progress.place.offset)
        run = Run(reader, scorer, writer, sink, progress, bar, order.max_rejected, rejected, window_rows=WINDOW_ROWS)
        try:
            stopped = await _until_signal(state, run)
        finally:
            seconds = bar.close()
    finally:
        if order.source != STREAM:  # a thread may still wait for a pipe
            reader.close()
    if stopped is not None:
        again = "the same command goes on there" if part is not None and order.source != STREAM else "what was written stays"
        print(f"stopped after {run.progress.place.row} rows; {again}.", file=sys.stderr)
        return 128 + stopped
    if part is not None:
        await _finish(part, run.progress, writer)
    return _end(run.progress, run.progress.place.row - progress.place.row, seconds, rejected)


async def _until_signal(state: AppState, run: Run) -> int | None:
    """Runs to the end, or to SIGINT or SIGTERM; returns the signal, if there was one."""
    loop = asyncio.get_running_loop()
    state.scheduler.start()
    work = asyncio.create_task(run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not stopped:
            raise
    except BertServeError as error:
        raise error if isinstance(error, StartError) else StartError(f"{error.message} Start the same command again.") from error
    finally:
        await state.scheduler.stop(0)
    return stopped[0] if stopped else None


async def _finish(part: Part, progress: Progress, writer: Any) -> None:
    try:
        await asyncio.to_thread(part.finish, progress, getattr(writer, "finish", None))
    except OSError as error:
        raise StartError(
            f"all rows are done, and the output cannot get its name ({error.strerror}). Make room, and start the same command again."
        ) from error


def _end(progress: Progress, rows: int, seconds: float, rejected: Path | None) -> int:
    """Says what was done; returns the exit code."""
    rate = f" in {seconds:.1f} s, {rows / seconds:,.0f} rows/s" if seconds and rows else ""
    print(
        f"{progress.place.row} rows: {progress.place.row - progress.rejected} answered, {progress.warned} of them with warnings"
        + (f", {progress.rejected} rejected ({rejected})" if progress.rejected else "")
        + f"; {rows} scored{rate}",
        file=sys.stderr,
    )
    return REJECTED if progress.rejected else 0


def _facts(
    state: AppState,
    model: Model,
    order: Order,
    scorer: Scorer,
    columns: Columns,
    kinds: Sequence[str],
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns all that the bytes of the output depend on, in the words of an error about what differs."""
    stream = {"stream of the process": os.getpid(), "since": time.time_ns()}  # no two are the same
    return {
        "input": stream if order.source == STREAM else identity_of(order.source),
        "model": [model.name, model.bundle.version, model.graph.file, model.graph.provider],
        "version": [__version__, state.machine["onnxruntime"], state.machine["cpu"]],
        "task": columns.task,
        "columns": [columns.by_field, *order.names],
        "parameters": parameters,
        "format": kinds,
        "limits": [state.limits.max_chars, state.limits.max_inputs, state.max_body_bytes],
        "batches": [scorer.batch_tokens, WINDOW_ROWS, WINDOW_BYTES],
        "file for rejected rows": str(order.rejected),
    }
