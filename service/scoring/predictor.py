"""Predictor: answers rows with a model's tokenizer, task and engine on a pool of threads, without the queue of the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.backend.freed_memory import limit_heaps
from bertserve.service.backend.hardware import usable_cores
from bertserve.service.backend.onnx_engine import Row as Outputs
from bertserve.service.bundle import files
from bertserve.service.errors import BertServeError, CallerError, EngineError
from bertserve.service.scoring.columns import Columns, RowTask
from bertserve.service.scoring.rows import Row, RowAnswer
from bertserve.service.serving import loading
from bertserve.service.serving.build import load_options
from bertserve.service.settings import ModelSettings
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun, begin
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.cost import MAX_MEMORY, Budget
from bertserve.service.text.tokenizer import Encoding

# Maximum rows and characters of a chunk, which a thread answers: enough for the batches of a GPU; on a CPU it takes one or two seconds.
CHUNK_ROWS, CHUNK_CHARS = 256, 2**15
# Padded tokens of a batch on a CPU: more rows save no time, and their activations do not fit the caches
# (bench/results/2026-11-23-score.md).
CPU_BATCH_TOKENS = 256
# Rows of a window, and bytes of their answers as JSON: all answers of a window are in memory.
WINDOW_ROWS, WINDOW_ANSWER_BYTES = 4096, 2**27


@dataclass(slots=True)
class _Started:
    """A task that has yielded a batch, the index of its row, and the outputs of the batch."""

    index: int
    run: TaskRun
    batch: Batch
    outputs: list[Any] = field(default_factory=list)


class Predictor:
    """The model of the settings, and the threads that answer rows.

    Results do not depend on the number of threads: a chunk depends only on the rows of a call, and a batch only on its chunk.
    """

    def __init__(self, settings: ModelSettings, task: RowTask) -> None:
        """Loads the only model of the settings' folders.

        Raises:
            StartError: The model cannot be loaded, or does not support the task.
        """
        (path,) = files.find_bundles(settings.models)
        bundle = files.load_bundle(path)
        requested = loading.choose_provider([bundle], settings.provider)
        provider = loading.obtain_provider(requested, allow_fallback=settings.allow_provider_fallback)
        opened = loading.open_bundle(bundle, load_options(settings, requested, provider))
        self.manifest, self.version, self.graph = bundle.manifest, bundle.version, opened.graph
        self._tokenizer, self._engine = opened.tokenizer, opened.engine
        self.columns = Columns(task, bundle.manifest, Limits(max_inputs=settings.max_inputs, max_chars=settings.max_chars))
        self.window_rows = max(1, min(WINDOW_ROWS, WINDOW_ANSWER_BYTES // max(1, self.columns.answer_bytes)))
        is_large = any(output.kind in ("per_mask", "per_map") for output in opened.graph.outputs)  # far more outputs than tokens
        is_small_batch = opened.graph.provider == "cpu" or is_large
        self.batch_tokens = min(settings.max_batch_tokens, CPU_BATCH_TOKENS) if is_small_batch else settings.max_batch_tokens
        self._shares_batches = opened.graph.batch_invariant or settings.batch_variant_graphs
        threads = settings.threads or (usable_cores() if opened.graph.provider == "cpu" else 1)
        limit_heaps(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="scoring")

    def start(self, rows: Sequence[Row]) -> Callable[[], Sequence[RowAnswer]]:
        """Starts to answer rows, by length in chunks; returns a function that waits for the answers, in order of the rows."""
        answers = [RowAnswer(error=row.error) for row in rows]
        requests: list[tuple[int, Any]] = []
        for index, row in enumerate(rows):
            if row.error is None:
                try:
                    requests.append((index, self.columns.request(row.values)))
                except CallerError as error:
                    answers[index].error = error
        requests.sort(key=lambda item: -item[1].chars)
        chunks: list[list[tuple[int, Any]]] = []
        chars = 0
        for item in requests:
            if not chunks or len(chunks[-1]) == CHUNK_ROWS or chars + item[1].chars > CHUNK_CHARS:
                chunks.append([])
                chars = 0
            chunks[-1].append(item)
            chars += item[1].chars
        futures = [self._pool.submit(self._answer, chunk, answers) for chunk in chunks]

        def result() -> Sequence[RowAnswer]:
            for future in futures:
                future.result()
            return answers

        return result

    def __enter__(self) -> Predictor:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads after their current chunks."""
        self._pool.shutdown(cancel_futures=True)

    def _answer(self, chunk: Sequence[tuple[int, Any]], answers: Sequence[RowAnswer]) -> None:
        """Answers a chunk. A row that cannot be encoded or decoded, or that the graph cannot score, gets an error alone."""
        started: list[_Started] = []
        memory = 0
        for index, request in chunk:
            run = self.columns.spec.run(request, TaskModel(self._tokenizer, self.manifest, Budget()))
            try:
                batch = begin(run)
                batch.cost.check()
            except BertServeError as error:
                answers[index].error = error
                continue
            cut = [f"truncation; cut to the model's {self.manifest.tokenizer.max_length} tokens"] if batch.truncated else []
            answers[index].warnings = [*batch.warnings, *cut]
            started.append(_Started(index, run, batch))
            memory += batch.cost.memory
            if memory > MAX_MEMORY:
                self._finish(started, answers)
                started, memory = [], 0
        self._finish(started, answers)

    def _finish(self, started: list[_Started], answers: Sequence[RowAnswer]) -> None:
        """Runs tasks until they end."""
        while started:
            self._run_graph(started, answers)
            running = []
            for task in started:
                answer = answers[task.index]
                try:
                    if answer.error is None:
                        task.batch = task.run.send(task.outputs)
                        running.append(task)
                except StopIteration as end:
                    answer.prediction = end.value
                except BertServeError as error:
                    answer.error = error
            started = running

    def _run_graph(self, started: Sequence[_Started], answers: Sequence[RowAnswer]) -> None:
        """Runs the encodings of all tasks, those of similar length together."""
        items: list[tuple[_Started, int, Encoding]] = []
        for task in started:
            task.outputs = [None] * len(task.batch.encodings)
            items += [(task, place, encoding) for place, encoding in enumerate(task.batch.encodings)]
        items.sort(key=lambda item: -len(item[2]))
        while items:
            count = 1
            while self._shares_batches and count < len(items) and self._fits(count + 1, len(items[0][2])):
                count += 1
            rows = self._outputs([encoding for _, _, encoding in items[:count]])
            for (task, place, _), row in zip(items[:count], rows, strict=True):
                if isinstance(row, EngineError):
                    answers[task.index].error = row
                else:
                    task.outputs[place] = row if task.batch.keep is None else task.batch.keep(place, row)
            items = items[count:]

    def _fits(self, rows: int, length: int) -> bool:
        shape = self.graph.shape(rows, length)
        return shape is not None and shape[0] * shape[1] <= self.batch_tokens

    def _outputs(self, encodings: Sequence[Encoding]) -> Sequence[Outputs | EngineError]:
        """Returns the outputs of each encoding of a batch; after an error each one runs alone."""
        try:
            return self._engine.run(encodings)
        except EngineError as error:
            return [error] if len(encodings) == 1 else [self._outputs([encoding])[0] for encoding in encodings]
