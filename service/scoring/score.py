"""The command `bert-serve score`, which runs a spec and returns an exit code. It is the composition root of offline scoring."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertserve.service import __version__
from bertserve.service.errors import BertServeError, SettingsError, StartError, plural
from bertserve.service.scoring.columns import read_parameters
from bertserve.service.scoring.formats import PARQUET, STREAM, Reader, format_of, make_writer, open_reader, total_size
from bertserve.service.scoring.part import (
    PartialOutput,
    ScoringProgress,
    check_distinct,
    check_stream,
    identity_of,
    refuse_existing,
    write_all,
)
from bertserve.service.scoring.row import Place
from bertserve.service.scoring.runner import WINDOW_BYTES, ProgressBar, ScoringRun, Sink
from bertserve.service.scoring.scorer import LoadedModel, ScoringSpec
from bertserve.service.scoring.text_lines import DELIMITERS
from bertserve.service.serving.build import AppState
from bertserve.service.settings import Settings

REJECTED = 3  # exit code of a finished run with rejected rows


class StdoutSink:
    """Stdout as the output; such a run cannot be continued."""

    def __init__(self, rejected: Path | None, *, restart: bool) -> None:
        """Creates the file of rejected rows, if requested; `restart` replaces an existing file.

        Raises:
            SettingsError: The file exists.
            StartError: The file cannot be written.
        """
        # unbuffered: a thread that waits for the consumer would hold the lock of a buffer, which the end of the process needs
        self._stdout = io.FileIO(sys.stdout.fileno(), "wb", closefd=False)
        self._rejected = rejected
        if rejected is None:
            return
        try:
            if not restart and (not rejected.exists() or rejected.is_file()):  # a device or a pipe has no content to lose
                refuse_existing(rejected, flag="--rejected")
            rejected.write_bytes(b"")
        except OSError as error:
            raise StartError(f"`{rejected}` cannot be written ({error.strerror}).") from error

    def append(self, data: bytes, rejected: bytes, progress: ScoringProgress) -> ScoringProgress:
        """Writes rows and rejected rows."""
        if self._rejected is not None and rejected:
            with self._rejected.open("ab") as file:
                file.write(rejected)
        write_all(self._stdout, data)
        return progress


def score(settings: Settings, spec: ScoringSpec) -> int:
    """Scores an input with the settings of one model; returns the exit code.

    Raises:
        StartError: Flags, files or the model are wrong, or too many rows were rejected; the message says what to do.
    """
    read_parameters(spec.parameters)  # before the model is loaded, because they may be wrong
    source, output = Path(spec.source), Path(spec.output)
    kind = format_of(source, spec.input_format, "--input-format")
    out_kind = spec.output_format or (kind if output == STREAM else format_of(output, None, "--output-format"))
    format_of(output, out_kind, "--output-format")
    if spec.json_cells and out_kind not in DELIMITERS:
        raise SettingsError(f"--json-cells is for CSV and TSV, and the output is {out_kind}; leave it out.")
    spec = replace(spec, output_format=out_kind)
    rejected = spec.rejected if output == STREAM else spec.rejected or output.with_name(output.name + ".rejected.jsonl")
    _check_files(source, output, rejected)
    identity = None if source == STREAM else identity_of(source)  # before the model is loaded, because its name may be wrong, too
    try:
        return asyncio.run(_Run(LoadedModel(settings, spec), spec, (kind, out_kind), rejected, identity)())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _check_files(source: Path, output: Path, rejected: Path | None) -> None:
    """Checks that the run writes neither to its input nor twice to the same file.

    Raises:
        SettingsError: It would.
    """
    files = {} if source == STREAM else {"the input": source}
    if output != STREAM and rejected is not None:
        check_distinct(files | PartialOutput(output, rejected, {}).files())
        return
    if rejected is not None:
        files["--rejected"] = rejected
    check_distinct(files)
    if sys.stdout is None:  # the process was started without it, as by `>&-`
        raise SettingsError("the output is stdout, which is closed; give a file.")
    check_stream(sys.stdout, files)


class _Run:
    """A run on this machine."""

    def __init__(
        self, loaded: LoadedModel, spec: ScoringSpec, kinds: tuple[str, str], rejected: Path | None, identity: dict[str, Any] | None
    ) -> None:
        self._loaded, self._spec, self._kinds, self._rejected, self._identity = loaded, spec, kinds, rejected, identity
        self._source, self._output = Path(spec.source), Path(spec.output)

    async def __call__(self) -> int:
        """Scores from the place where an earlier run stopped; returns the exit code."""
        part = None
        if self._source != STREAM:  # before a file is created, truncated or replaced
            self._reader(Place()).close()
        if self._output != STREAM and self._rejected is not None:
            part = PartialOutput(self._output, self._rejected, self._facts())
        progress = ScoringProgress() if part is None else part.open(restart=self._spec.restart)
        try:
            if part is not None and part.is_named(progress):
                part.tidy(progress)
                return _end(progress, 0, 0.0, self._rejected)
            return await self._score(part, progress)
        finally:
            if part is not None:
                part.close()

    def _reader(self, place: Place) -> Reader:
        """Returns the reader of the input from a place on.

        Raises:
            SettingsError: The input lacks required columns.
        """
        columns = self._loaded.columns
        reader = open_reader(
            self._source,
            self._kinds[0],
            place,
            max_bytes=self._loaded.state.max_body_bytes,
            inputs=list(columns.by_field.values()),
            whole=self._kinds[1] != PARQUET,  # Parquet's own columns are copied to Parquet unchanged
        )
        try:
            if reader.columns is not None:
                columns.check(reader.columns)
        except SettingsError:
            reader.close()
            raise
        return reader

    async def _score(self, part: PartialOutput | None, progress: ScoringProgress) -> int:
        """Scores from the current progress; returns the exit code."""
        loaded, spec, rejected = self._loaded, self._spec, self._rejected
        sink: Sink = StdoutSink(rejected, restart=spec.restart) if part is None else part
        reader = self._reader(progress.place)
        try:
            known = part.path if part is not None and progress.output_bytes else None
            writer = make_writer(self._kinds[1], reader, loaded.columns.task, loaded.names, known=known, json_cells=spec.json_cells)
            bar = ProgressBar(total_size(self._source, reader), progress.place.offset)
            run = ScoringRun(reader, loaded.scorer, writer, sink, progress, bar, spec.max_rejected, rejected, loaded.window_rows)
            try:
                stopped = await _until_signal(loaded.state, run, spec.continue_command)
            finally:
                seconds = bar.close()
        finally:
            if self._source != STREAM:  # a thread may still wait for a pipe
                reader.close()
        if stopped is not None:
            again = (
                f"run {spec.continue_command} to continue"
                if part is not None and self._source != STREAM
                else "the rows that were written are kept"
            )
            print(f"stopped after {plural(run.progress.place.row, 'row')}; {again}.", file=sys.stderr)
            return 128 + stopped
        if self._identity is not None and identity_of(self._source) != self._identity:
            raise StartError(
                f"the input `{self._source}` changed during the run, so the output may have rows of two versions; start again"
                + (" with --restart." if rejected is not None else ".")
            )
        if part is not None:
            await _finish(part, run.progress, writer, spec.continue_command)
        return _end(run.progress, run.progress.place.row - progress.place.row, seconds, rejected)

    def _facts(self) -> dict[str, Any]:
        """Returns everything that affects the bytes of the output; its names are used in errors."""
        stream = {"stream of the process": os.getpid(), "since": time.time_ns()}  # unique for each stream
        loaded, state, model = self._loaded, self._loaded.state, self._loaded.model
        return {
            "input": self._identity or stream,
            "model": [model.name, model.bundle.version, model.graph.file, model.graph.provider],
            "version": [__version__, state.machine.onnxruntime, state.machine.cpu],
            "task": loaded.columns.task,
            "columns": [loaded.columns.by_field, *loaded.names],
            "parameters": loaded.parameters,
            "--empty": self._spec.empty,
            "--json-cells": self._spec.json_cells,
            "format": self._kinds,
            "limits": [state.limits.max_chars, state.limits.max_inputs, state.max_body_bytes],
            "--max-queue-tokens": loaded.settings.max_queue_tokens,
            "--batch-variant-graphs": loaded.settings.batch_variant_graphs,
            "batches": [loaded.scorer.batch_tokens, loaded.window_rows, WINDOW_BYTES],
            "file for rejected rows": str(self._spec.rejected),
        }


async def _until_signal(state: AppState, run: ScoringRun, continue_command: str) -> int | None:
    """Runs to the end, or to SIGINT or SIGTERM; returns the signal, if any. `continue_command` continues the run."""
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
        raise error if isinstance(error, StartError) else StartError(f"{error.message} Run {continue_command}.") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StartError(
            f"the output cannot be written ({error.strerror}); {run.progress.place.row} rows are done. Free disk space, and run {continue_command}."
        ) from error
    finally:
        await state.scheduler.stop(0)
    return stopped[0] if stopped else None


async def _finish(part: PartialOutput, progress: ScoringProgress, writer: Any, continue_command: str) -> None:
    try:
        await asyncio.to_thread(part.finish, progress, getattr(writer, "finish", None))
    except OSError as error:
        raise StartError(
            f"all rows are done, but the output cannot be renamed ({error.strerror}). Free disk space, and run {continue_command}."
        ) from error


def _end(progress: ScoringProgress, rows: int, seconds: float, rejected: Path | None) -> int:
    """Prints a summary; returns the exit code."""
    rate = f" in {seconds:.1f} s, {rows / seconds:,.0f} rows/s" if seconds and rows else ""
    print(
        f"{plural(progress.place.row, 'row')}: {progress.place.row - progress.rejected} answered, {progress.warned} of them with warnings"
        + (f", {progress.rejected} rejected ({rejected})" if progress.rejected else "")
        + f"; {rows} scored{rate}",
        file=sys.stderr,
    )
    return REJECTED if progress.rejected else 0
