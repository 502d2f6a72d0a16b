"""Model: a bundle with its tokenizer, engine and task behind one call. Knows the scheduler, not threads; no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from service.backend.cost import CostModel
from service.backend.engines import Engines
from service.backend.onnx_engine import Row
from service.bundle.files import Bundle
from service.bundle.graph_spec import GraphSpec
from service.errors import BertServeError, ExpiredError, RefusedError, TooLargeError
from service.metrics import ModelMetrics
from service.scheduling.scheduler import Scheduler, Stage
from service.tasks import answer, classify, embed, fill_mask, ner, rerank, similarity, zero_shot
from service.tasks.uses import tasks_of
from service.text.tokenizer import SHORT_CHARS, Encoding, Tokenizer


class TaskModule(Protocol):
    """What `service/tasks/<task>.py` provides; each has its own Request."""

    def estimate(self, request: Any, max_length: int) -> int:
        """Returns a cheap guess of the request's tokens."""
        ...

    def encode(self, request: Any, tokenizer: Tokenizer) -> Any:
        """Returns the request's encodings and whether text was cut off."""
        ...

    def decode(self, request: Any, encoded: Any, rows: Any, head: Any) -> Any:
        """Returns the request's result."""
        ...


TASKS: dict[str, TaskModule] = {
    classify.TASK: classify,
    ner.TASK: ner,
    answer.TASK: answer,
    fill_mask.TASK: fill_mask,
    embed.TASK: embed,
    zero_shot.TASK: zero_shot,
    rerank.TASK: rerank,
    similarity.TASK: similarity,
}
# Numbers in one answer: a million take 20 MB and a tenth of a second to write.
MAX_VALUES = 2**20


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the parts of one request."""

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to a request.

    Attributes:
        results: One per input, in order.
        truncated: Indices of inputs of which text was cut off.
        warnings: What else the caller should know, each `topic; message`.
        timings: Where the time went.
    """

    results: list[Any]
    truncated: list[int]
    warnings: list[str]
    timings: Timings


@dataclass(frozen=True, slots=True)
class _Work:
    """The payload of a scheduler entry: one encoding of one input."""

    encoding: Encoding
    input_index: int

    def __len__(self) -> int:
        return len(self.encoding)


@dataclass(frozen=True, slots=True)
class _Decoded:
    results: list[Any]
    truncated: list[int]
    warnings: list[str]
    tokenize_s: float
    decode_s: float


class Model:
    """A loaded model.

    Attributes:
        bundle: What it was loaded from.
        graph: Which of its graphs runs.
        tasks: All tasks that it answers, its own first.
        engines: What runs it.
    """

    def __init__(
        self,
        bundle: Bundle,
        graph: GraphSpec,
        *,
        tokenizer: Tokenizer,
        engines: Engines,
        cost: CostModel,
        scheduler: Scheduler,
        metrics: ModelMetrics,
        batch_variant: bool = False,
    ) -> None:
        """Puts the parts together.

        Args:
            bundle: The verified bundle.
            graph: The graph of it that the engine runs.
            tokenizer: Its tokenizer.
            engines: Run the graph.
            cost: Predicts runs on a lane.
            scheduler: The lanes of the engine's device.
            metrics: This model's metrics.
            batch_variant: Batch texts even if the graph is not batch-invariant.
        """
        self.bundle = bundle
        self.graph = graph
        self.tasks = tasks_of(bundle.manifest)
        self._tokenizer = tokenizer
        self.engines = engines
        self._cost = cost
        self._scheduler = scheduler
        self._metrics = metrics
        self._key = self if graph.batch_invariant or batch_variant else None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.bundle.manifest.name

    @property
    def task(self) -> str:
        """The Hugging Face name of its task."""
        return self.bundle.manifest.task

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self._scheduler.ready

    async def predict(self, requests: Sequence[Any], *, timeout_s: float, task: str | None = None) -> Prediction:
        """Answers the inputs of one request, all or none. Cancelling the coroutine gives up their places.

        Entries of all tasks of a model share batches: the graph is the same. What is counted for a run is counted for the
        model's own task, what is counted for a request for the one asked for.

        Args:
            requests: `Request` objects of the task, one per input; may be empty.
            timeout_s: Seconds until the last of them must have started.
            task: One of `tasks`; the model's own when None.

        Raises:
            TooLargeError: Larger than the queue, or the answer would have too many numbers.
            RefusedError: No room now.
            ExpiredError: The deadline passed.
            InvalidValueError: An input cannot be encoded; `input_index` says which.
            EngineError: The graph failed on an input; `input_index` says which.
            UnavailableError: The service is stopping, or broken.
        """
        if not requests:
            return Prediction([], [], [], Timings())
        metrics = self._metrics if task is None else self._metrics.of(task)
        try:
            return await self._predict(requests, timeout_s, TASKS[task or self.task], metrics)
        except RefusedError as error:
            metrics.refused[error.reason].inc()
            raise
        except ExpiredError:
            metrics.expired.inc()
            raise
        except asyncio.CancelledError:
            metrics.cancelled.inc()
            raise

    async def _predict(self, requests: Sequence[Any], timeout_s: float, task: TaskModule, metrics: ModelMetrics) -> Prediction:
        tokens, seconds = self._estimate(requests, task)
        job = self._scheduler.admit(tokens=tokens, seconds=seconds, timeout_s=timeout_s)
        try:
            # a hop to a lane and back costs more than tokenizing a short text
            if sum(request.chars for request in requests) <= SHORT_CHARS:
                stage = self._encode(requests, task)
            else:
                stage = Stage(
                    work=[(0, requests)],
                    run=lambda payloads: [self._encode(payload, task) for payload in payloads],
                    finish=lambda stages: stages[0],
                    key=None,
                    cost=lambda rows, length: 0.0,
                    keep_estimate=True,
                )
        except BaseException:
            self._scheduler.close(job)
            raise
        timed = await self._scheduler.run(job, stage)
        decoded: _Decoded = timed.value
        timings = Timings(decoded.tokenize_s, timed.queue_s, timed.run_s, decoded.decode_s)
        metrics.tokenize_seconds.observe(timings.tokenize_s)
        metrics.queue_seconds.observe(timings.queue_s)
        metrics.decode_seconds.observe(timings.decode_s)
        metrics.truncated.inc(len(decoded.truncated))
        return Prediction(decoded.results, decoded.truncated, decoded.warnings, timings)

    def _estimate(self, requests: Sequence[Any], task: TaskModule) -> tuple[int, float]:
        """Returns a cheap guess of the tokens and seconds that the requests cost; what is over one text comes in windows."""
        longest = self._tokenizer.max_length
        tokens = [task.estimate(request, longest) for request in requests]
        seconds = sum(self._cost.seconds(1, min(n, longest)) * max(1, n / longest) for n in tokens)
        return sum(tokens), seconds

    def _encode(self, requests: Sequence[Any], task: TaskModule) -> Stage:
        """Tokenizes all inputs; returns the stage that runs them."""
        start = time.perf_counter()
        encoded = []
        for index, request in enumerate(requests):
            try:
                encoded.append(task.encode(request, self._tokenizer))
            except BertServeError as error:
                error.input_index = index
                raise
        tokenize_s = time.perf_counter() - start
        values = sum(item.values for item in encoded)
        if values > MAX_VALUES:
            raise TooLargeError(
                f"the answer would be as long as {values} numbers and {MAX_VALUES} are allowed; send fewer texts at once, or ask for less of "
                "each: a smaller `top_k`, pooled tokens."
            )
        work = [_Work(encoding, index) for index, item in enumerate(encoded) for encoding in item.encodings]
        return Stage(
            work=[(item.encoding.cost_tokens, item) for item in work],
            run=self._run,
            finish=partial(self._decode, task, requests, encoded, tokenize_s),
            key=self._key,
            cost=self._cost.seconds,
            shape=self.graph.shape,
            run_idle=partial(self._run, alone=True),
        )

    def _run(self, works: Sequence[_Work], *, alone: bool = False) -> list[Row]:
        real, longest = sum(map(len, works)), max(map(len, works))
        height, width = self.graph.shape(len(works), longest) or (len(works), longest)
        engine = self.engines.alone(height * width) if alone else self.engines.lane
        start, start_busy = time.perf_counter(), time.thread_time()
        try:
            rows = engine.run([work.encoding for work in works])
        except BertServeError as error:
            if len(works) == 1:
                error.input_index = works[0].input_index
            raise
        seconds = time.perf_counter() - start
        if engine is self.engines.lane:
            # one thread does all of a lane's run on the CPU; beside another device it waits
            busy_s = time.thread_time() - start_busy if self.graph.provider == "cpu" else None
            self._cost.follow(height, width, seconds, busy_s)
        else:
            self._metrics.idle_runs.inc()
        self._metrics.inference_seconds.observe(seconds)
        self._metrics.batch_rows.observe(len(works))
        self._metrics.tokens_real.inc(real)
        self._metrics.tokens_padded.inc(height * width - real)
        return rows

    def _decode(
        self, task: TaskModule, requests: Sequence[Any], encoded: Sequence[Any], tokenize_s: float, rows: Sequence[Row]
    ) -> _Decoded:
        start = time.perf_counter()
        manifest = self.bundle.manifest
        results = []
        first = 0
        for request, item in zip(requests, encoded, strict=True):
            last = first + len(item.encodings)
            results.append(task.decode(request, item, rows[first:last], manifest))
            first = last
        truncated = [index for index, item in enumerate(encoded) if item.truncated]
        warnings = [warning for item in encoded for warning in item.warnings]
        return _Decoded(results, truncated, warnings, tokenize_s, time.perf_counter() - start)
