"""ScoringSpec: the data to score and the options; LoadedModel: its model, in this process or in an actor of Ray; Scorer: answers rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.service.errors import BertServeError, CallerError, RefusedError, SettingsError, UnavailableError
from bertserve.service.scoring.columns import Columns, Empty, read_parameters, task_for
from bertserve.service.scoring.row import Row, RowAnswer
from bertserve.service.scoring.text_lines import DELIMITERS
from bertserve.service.serving.build import build
from bertserve.service.serving.model import Model
from bertserve.service.serving.work import Prediction
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS

# Maximum rows and characters of a chunk: enough for the batches of a GPU; on a CPU it takes one or two seconds.
CHUNK_ROWS, CHUNK_CHARS = 256, 2**15
# Padded tokens of a batch on a CPU: more rows save no time, and their activations do not fit the caches
# (bench/results/2026-11-23-score.md).
CPU_BATCH_TOKENS = 256
# Rows of a window, and bytes of their answers as JSON: all answers of a window are in memory.
WINDOW_ROWS, WINDOW_ANSWER_BYTES = 4096, 2**27
# Rows have no deadline, but the scheduler needs one.
DEADLINE_S = 86_400.0
LEAST_WAIT_S, MOST_WAIT_S = 0.02, 1.0

_Item = tuple[int, Any]


class Scorer:
    """Answers rows; several calls may run at the same time."""

    def __init__(self, model: Model, columns: Columns, *, threads: int, max_batch_tokens: int) -> None:
        """Creates it for a model whose scheduler has started and runs `threads` batches at the same time; chunks are slightly more."""
        self._model, self._columns = model, columns
        self._chunks = 2 * threads + 2
        # padded tokens of a batch; the last digits of the answers may depend on it
        self.batch_tokens = min(max_batch_tokens, CPU_BATCH_TOKENS) if model.graph.provider == "cpu" else max_batch_tokens

    async def answer(self, rows: Sequence[Row], on_done: Callable[[int, int], None] = lambda size, rows: None) -> list[RowAnswer]:
        """Returns one answer per row, in order, with the row's error if any; `on_done` gets size and number of the rows that are done.

        Raises:
            UnavailableError: An inference thread has died, or all of them hang.
        """
        answers: list[RowAnswer] = [RowAnswer()] * len(rows)
        requests: list[_Item] = []
        for index, row in enumerate(rows):
            try:
                if row.error is not None:
                    raise row.error
                requests.append((index, self._columns.request(row.values, self._model.bundle.manifest)))
            except CallerError as error:
                answers[index] = RowAnswer(error=error)
                on_done(row.size, 1)
        requests.sort(key=lambda item: -item[1].chars)
        chunks = _chunks(requests)

        async def work() -> None:
            for chunk in chunks:
                for index, answer in zip((index for index, _ in chunk), await self._run(chunk), strict=True):
                    answers[index] = answer
                on_done(sum(rows[index].size for index, _ in chunk), len(chunk))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._chunks):
                    group.create_task(work())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return answers

    async def _run(self, chunk: Sequence[_Item]) -> list[RowAnswer]:
        """Returns the answers of a chunk. After an error it runs the chunk without the faulty row, or in halves if that row is unknown."""
        try:
            prediction = await self._predict([request for _, request in chunk])
        except UnavailableError:
            raise
        except BertServeError as error:
            return await self._run_rest(chunk, error)
        warnings: list[list[str]] = [[] for _ in chunk]
        for index, warning in prediction.warnings:
            warnings[index].append(warning)
        for index in prediction.truncated:
            warnings[index].append(f"truncation; cut to the model's {self._model.bundle.manifest.tokenizer.max_length} tokens")
        return [RowAnswer(result, tuple(messages)) for result, messages in zip(prediction.results, warnings, strict=True)]

    async def _run_rest(self, chunk: Sequence[_Item], error: BertServeError) -> list[RowAnswer]:
        if len(chunk) == 1:
            error.name_input(many=False, subject="the row")
            return [RowAnswer(error=error)]
        if (guilty := error.input_index) is not None:
            before, after = list(chunk[:guilty]), list(chunk[guilty + 1 :])
            rest = await self._run(before + after)
            error.name_input(many=False, subject="the row")
            return [*rest[:guilty], RowAnswer(error=error), *rest[guilty:]]
        half = len(chunk) // 2
        return [*await self._run(chunk[:half]), *await self._run(chunk[half:])]

    async def _predict(self, requests: Sequence[Any]) -> Prediction:
        """Returns the prediction; while the queue is full, it waits and tries again."""
        while True:
            try:
                return await self._model.predict(
                    requests,
                    timeout_s=DEADLINE_S,
                    task=self._columns.task,
                    counts_refusals=False,
                    fixed_batch_tokens=self.batch_tokens,
                )
            except RefusedError as error:
                await asyncio.sleep(min(max(error.retry_after_s, LEAST_WAIT_S), MOST_WAIT_S))


def _chunks(requests: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yields the rows of each chunk."""
    chunk: list[_Item] = []
    chars = 0
    for item in requests:
        if chunk and (len(chunk) == CHUNK_ROWS or chars + item[1].chars > CHUNK_CHARS):
            yield chunk
            chunk, chars = [], 0
        chunk.append(item)
        chars += item[1].chars
    if chunk:
        yield chunk


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The data to score, and the options.

    Attributes:
        source: The input, or `-`; with Ray a folder of Parquet files, or its URI.
        output: The output, or `-`; with Ray a folder, or its URI.
        task: The task to score by; None for the model's own, or the one that parameters or columns identify.
        columns: Field of the task -> column.
        parameters: JSON object, in the format of the endpoint.
        names: Names of the columns for predictions and warnings.
        max_rejected: Maximum number of rows without an answer.
        json_cells: Whether predictions in CSV and TSV are always JSON, even those with one label.
        empty: The handling of rows with an empty text.
        restart: Whether to start from the first row, and to replace the output of an earlier run.
        input_format: Format of the input; None to use its name.
        output_format: Format of the output; None to use its name, or otherwise the input's format.
        rejected: The file for rows without an answer; None for a file next to the output.
        ray: Address of the cluster; `local` for a temporary one on this machine, `auto` for this machine's cluster.
        actors: Number of actors; None for as many as fit.
        actor_cpus: CPUs and inference threads of each actor; None for those of the smallest node, at most 4.
    """

    source: str
    output: str
    task: str | None
    columns: Mapping[str, str]
    parameters: str
    names: tuple[str, str]
    max_rejected: int
    restart: bool
    json_cells: bool = False
    empty: Empty = "warn"
    input_format: str | None = None
    output_format: str | None = None
    rejected: Path | None = None
    ray: str | None = None
    actors: int | None = None
    actor_cpus: int | None = None

    @property
    def continue_command(self) -> str:
        """The command that continues the run, for messages after "run"."""
        return "the same command without --restart" if self.restart else "the same command again"


class LoadedModel:
    """The model of a spec, and the objects that answer rows.

    Attributes:
        settings: The settings.
        state: The service without HTTP.
        model: The model.
        parameters: Parameters of each request.
        columns: Builds requests from rows.
        names: The columns that the output adds; the last one is for warnings.
        window_rows: Maximum rows of a window; it depends only on the order and the model, so that a run can resume.
        scorer: Answers rows.
    """

    def __init__(self, settings: Settings, spec: ScoringSpec) -> None:
        """Loads the model.

        Raises:
            StartError: The model cannot be loaded, or does not support the order.
        """
        self.settings, self.state = settings, build(settings)
        (self.model,) = self.state.registry.models.values()
        self.parameters = read_parameters(spec.parameters)
        task = task_for(self.model.tasks, spec.task, self.parameters, spec.columns)
        prediction, warnings = spec.names
        has_one_label = TASKS[task].has_one_label(self.parameters, self.model.bundle.manifest)
        flat = spec.output_format in DELIMITERS and not spec.json_cells and has_one_label
        self.names = (f"{prediction}_label", f"{prediction}_score", warnings) if flat else spec.names
        self.columns = Columns(task, spec.columns, self.parameters, self.state.limits, self.names, spec.empty)
        if warnings in self.names[:-1]:
            raise SettingsError(f"--warnings-column is `{warnings}`, which is a column of the prediction; give another name.")
        self.window_rows = max(1, min(WINDOW_ROWS, WINDOW_ANSWER_BYTES // max(1, self.columns.answer_bytes(self.model.bundle.manifest))))
        threads, max_batch_tokens = self.state.worker.threads, settings.max_batch_tokens
        self.scorer = Scorer(self.model, self.columns, threads=threads, max_batch_tokens=max_batch_tokens)
