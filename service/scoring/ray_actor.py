"""FileScorer: an actor of Ray that has the model, and answers one file of a folder after another."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from bertserve.service.errors import BertServeError, SettingsError, StartError
from bertserve.service.scoring.columns import Columns
from bertserve.service.scoring.formats import PARQUET, make_writer
from bertserve.service.scoring.parquet_folder import REJECTED_SUFFIX, ParquetFolder, ParquetOutput
from bertserve.service.scoring.part import Progress
from bertserve.service.scoring.progress import ProgressBar
from bertserve.service.scoring.runner import WINDOW_ROWS, Run, TooManyRejectedError
from bertserve.service.scoring.scorer import Scorer
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings


@dataclass(frozen=True, slots=True)
class Work:
    """What an actor needs to know.

    Attributes:
        settings: With one model.
        version: Of its bundle.
        source: Where files are read.
        output: Where files are made.
        task: The task.
        columns: Field of the task -> column.
        parameters: Of each request.
        names: Of the columns for predictions and warnings.
        max_rejected: Rows of a file that may have no answer.
    """

    settings: Settings
    version: str
    source: ParquetFolder
    output: ParquetFolder
    task: str
    columns: Mapping[str, str]
    parameters: Mapping[str, Any]
    names: tuple[str, str]
    max_rejected: int


class FileScorer:
    """An actor: the model, and a loop that scores one file after another."""

    def __init__(self, work: Work) -> None:
        """Loads the model, with as many lanes as Ray gives it CPUs."""
        self._work = work
        self._error: StartError | None = None
        try:
            self._load(round(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
        except StartError as error:  # an answer to each file, so that the driver hears it as it is
            self._error = error

    def _load(self, lanes: int) -> None:
        work = self._work
        self._state = state = build(work.settings.model_copy(update={"lanes": max(lanes, 1)}))
        (model,) = state.registry.models.values()
        if model.bundle.version != work.version:
            raise SettingsError(
                f"node {socket.gethostname()} has another version of the model `{model.name}` than the driver: {model.bundle.version} in place "
                f"of {work.version}; give all nodes the same bundle."
            )
        self._columns = Columns(work.task, work.columns, work.parameters, state.limits)
        self._scorer = Scorer(
            model, self._columns, lanes=state.worker["lanes"], max_batch_tokens=work.settings.max_batch_tokens, taken=work.names
        )
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._state.scheduler.start()

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """Scores the one file of a batch; returns its counts, and what is wrong with it."""
        (name,) = batch["file"]
        progress, error = Progress(), self._error
        try:
            if error is None:
                progress = self._runner.run(self._score(str(name)))
        except StartError as caught:
            error = caught
        except BertServeError:
            # a lane died or hangs: with another process in place of this one the file is begun again
            os._exit(1)
        fatal = self._error is not None or isinstance(error, SettingsError | TooManyRejectedError)
        return {
            "file": [str(name)],
            "rows": [progress.place.row],
            "rejected": [progress.rejected],
            "warned": [progress.warned],
            "error": ["" if error is None else error.message],
            "fatal": [fatal],
        }

    async def _score(self, name: str) -> Progress:
        work = self._work
        reader = work.source.reader(name, list(self._columns.by_field.values()))
        try:
            self._columns.check(reader.columns, work.names)
            writer: Any = make_writer(PARQUET, reader, work.task, work.names, known=b"")
            output = ParquetOutput(work.output, name, writer)
            beside = Path(name + REJECTED_SUFFIX)
            run = Run(reader, self._scorer, writer, output, Progress(), ProgressBar(None, 0), work.max_rejected, beside, WINDOW_ROWS)
            try:
                await run()
                await asyncio.to_thread(output.finish)
            except OSError as error:
                raise StartError(f"the output cannot be written: {error}.") from error
            finally:
                output.discard()
        finally:
            reader.close()
        return run.progress
