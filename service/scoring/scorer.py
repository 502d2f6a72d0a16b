"""Scorer: a batch of rows in, a batch of answers out, by a loaded model and the scheduler that serves it. Knows no files.

Rows go to the scheduler in jobs of like length, sorted. A job's batches follow from its rows alone, so the same rows have the same
answers to the last digit, however often they are scored and whatever else runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bertserve.service.errors import BertServeError, CallerError, RefusedError, UnavailableError
from bertserve.service.scoring.columns import Columns
from bertserve.service.scoring.row import Answer, Row
from bertserve.service.serving.model import Model
from bertserve.service.serving.prediction import Prediction

# Of a job: enough for the batches of a GPU, and on a CPU a second or two.
JOB_ROWS, JOB_CHARS = 256, 2**15
# Padded tokens of a batch on a CPU: more rows save nothing more, and their activations leave the caches (bench/results/2026-11-23-score.md).
CPU_BATCH_TOKENS = 256
# A row has no deadline; the scheduler wants one.
DEADLINE_S = 86_400.0
LEAST_WAIT_S, MOST_WAIT_S = 0.02, 1.0

_Item = tuple[int, Any]


class Scorer:
    """Answers rows; several calls may run at once."""

    def __init__(self, model: Model, columns: Columns, *, lanes: int, max_batch_tokens: int, taken: Sequence[str]) -> None:
        """Creates it.

        Args:
            model: The model; its scheduler runs.
            columns: Makes requests of rows.
            lanes: Batches that run at once; there are as many jobs and some more.
            max_batch_tokens: Budget of a batch.
            taken: Columns that the output has besides those of the row.
        """
        self._model, self._columns, self._taken = model, columns, taken
        self._jobs = 2 * lanes + 2
        self._batch_tokens = min(max_batch_tokens, CPU_BATCH_TOKENS) if model.graph.provider == "cpu" else max_batch_tokens

    @property
    def batch_tokens(self) -> int:
        """Padded tokens of a batch, on which the last digits of the answers may depend."""
        return self._batch_tokens

    async def answer(self, rows: Sequence[Row], on_done: Callable[[int, int], None] = lambda size, rows: None) -> list[Answer]:
        """Returns one answer per row, in order; what is wrong with a row is its answer's error.

        Args:
            rows: The rows.
            on_done: Called with the size and the number of rows that are done.

        Raises:
            UnavailableError: A lane died, or all of them hang.
        """
        answers: list[Answer] = [Answer()] * len(rows)
        requests: list[_Item] = []
        for index, row in enumerate(rows):
            try:
                if row.error is not None:
                    raise row.error
                requests.append((index, self._columns.request(row.values, self._model.bundle.manifest, self._taken)))
            except CallerError as error:
                answers[index] = Answer(error=error)
                on_done(row.size, 1)
        requests.sort(key=lambda item: -item[1].chars)
        jobs = _jobs(requests)

        async def work() -> None:
            for job in jobs:
                for index, answer in zip((index for index, _ in job), await self._run(job), strict=True):
                    answers[index] = answer
                on_done(sum(rows[index].size for index, _ in job), len(job))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._jobs):
                    group.create_task(work())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return answers

    async def _run(self, job: Sequence[_Item]) -> list[Answer]:
        """Returns the answers of a job: without a row that is at fault, and where none is known in halves, until it is found."""
        try:
            prediction = await self._predict([request for _, request in job])
        except UnavailableError:
            raise
        except BertServeError as error:
            return await self._run_rest(job, error)
        warnings: list[list[str]] = [[] for _ in job]
        for index, warning in zip(prediction.warned, prediction.warnings, strict=True):
            warnings[index].append(warning)
        for index in prediction.truncated:
            warnings[index].append(f"truncation; cut to the model's {self._model.bundle.manifest.tokenizer.max_length} tokens")
        return [Answer(result, tuple(said)) for result, said in zip(prediction.results, warnings, strict=True)]

    async def _run_rest(self, job: Sequence[_Item], error: BertServeError) -> list[Answer]:
        if len(job) == 1:
            error.name_input(many=False, subject="the row")
            return [Answer(error=error)]
        if (guilty := error.input_index) is not None:
            before, after = list(job[:guilty]), list(job[guilty + 1 :])
            rest = await self._run(before + after)
            error.name_input(many=False, subject="the row")
            return [*rest[:guilty], Answer(error=error), *rest[guilty:]]
        half = len(job) // 2
        return [*await self._run(job[:half]), *await self._run(job[half:])]

    async def _predict(self, requests: Sequence[Any]) -> Prediction:
        """Returns the prediction; while there is no room for it, it waits and asks again."""
        while True:
            try:
                return await self._model.predict(
                    requests,
                    timeout_s=DEADLINE_S,
                    task=self._columns.task,
                    counts_refusals=False,
                    fixed_batch_tokens=self._batch_tokens,
                )
            except RefusedError as error:
                await asyncio.sleep(min(max(error.retry_after_s, LEAST_WAIT_S), MOST_WAIT_S))


def _jobs(requests: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yields the rows of a job each."""
    job: list[_Item] = []
    chars = 0
    for item in requests:
        if job and (len(job) == JOB_ROWS or chars + item[1].chars > JOB_CHARS):
            yield job
            job, chars = [], 0
        job.append(item)
        chars += item[1].chars
    if job:
        yield job
