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
from bertserve.service.scoring.formats import PARQUET, make_writer
from bertserve.service.scoring.order import LoadedModel, Order
from bertserve.service.scoring.parquet_folder import REJECTED_SUFFIX, ParquetFolder, ParquetOutput
from bertserve.service.scoring.part import Progress
from bertserve.service.scoring.runner import WINDOW_ROWS, ProgressBar, Run, TooManyRejectedError
from bertserve.service.settings import Settings


@dataclass(frozen=True, slots=True)
class Work:
    """What an actor needs to know.

    Attributes:
        settings: With one model.
        version: Of its bundle.
        order: What is to be scored.
        source: Where files are read.
        output: Where files are made.
    """

    settings: Settings
    version: str
    order: Order
    source: ParquetFolder
    output: ParquetFolder


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
        self._loaded = loaded = LoadedModel(work.settings.model_copy(update={"lanes": max(lanes, 1)}), work.order)
        if loaded.model.bundle.version != work.version:
            raise SettingsError(
                f"node {socket.gethostname()} has another version of the model `{loaded.model.name}` than the driver: "
                f"{loaded.model.bundle.version} in place of {work.version}; give all nodes the same bundle."
            )
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._loaded.state.scheduler.start()

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
        columns, order = self._loaded.columns, work.order
        reader = work.source.reader(name, list(columns.by_field.values()))
        try:
            columns.check(reader.columns, order.names)
            writer: Any = make_writer(PARQUET, reader, columns.task, order.names, known=b"")
            output = ParquetOutput(work.output, name, writer)
            beside = Path(name + REJECTED_SUFFIX)
            bar = ProgressBar(None, 0)
            run = Run(reader, self._loaded.scorer, writer, output, Progress(), bar, order.max_rejected, beside, WINDOW_ROWS)
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
