"""Model: answers requests with a bundle's tokenizer, graph and tasks. It uses the scheduler, but no threads and no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.engines import Engines
from bertserve.service.errors import ExpiredError, RefusedError, TooLargeError
from bertserve.service.metrics import ModelMetrics
from bertserve.service.models.request_run import Prediction, RequestRun
from bertserve.service.models.runner import ModelRunner
from bertserve.service.scheduling.scheduled_request import ScheduledRequest
from bertserve.service.scheduling.scheduler import LARGE_BYTES, Scheduler
from bertserve.service.tasks.batch import TaskModel
from bertserve.service.tasks.catalog import TASKS, tasks_of
from bertserve.service.tasks.cost import MAX_CHARS, TEXT_CHARS
from bertserve.service.text.tokenizer import SHORT_CHARS, Tokenizer
from bertserve.service.tracing.trace import Trace


class Model:
    """A loaded model; `tasks` has the Hugging Face names of all tasks that it answers, its own task first."""

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
        """Combines the parts of a model; with `batch_variant`, texts share a batch even if the graph is not batch-invariant.

        The scheduler is that of the engines' device. `cost` predicts the seconds of a run on an inference thread.
        """
        self.bundle = bundle
        self.name = bundle.manifest.name
        self.task: str = bundle.manifest.task
        self.graph = graph
        self.tasks = tasks_of(bundle.manifest)
        self._parts = TaskModel(tokenizer, bundle.manifest)
        self._scheduler = scheduler
        self._metrics = metrics
        name, version, precision, provider = self.labels
        labels = {"model": name, "model.version": version, "task": self.task, "precision": precision, "provider": provider}
        self.runner = ModelRunner(
            graph, engines, cost, metrics, labels=labels, vocabulary_size=tokenizer.vocabulary_size, batch_variant=batch_variant
        )

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """Name, version, precision and provider: the labels of the metric `model_info`."""
        return self.name, self.bundle.version, self.graph.precision, self.graph.provider

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self._scheduler.ready

    async def predict(
        self,
        requests: Sequence[Any],
        *,
        timeout_s: float,
        task: str | None = None,
        counts_refusals: bool = True,
        trace: Trace | None = None,
    ) -> Prediction:
        """Answers either all inputs of one request or none. If the coroutine is cancelled, its items leave the queue.

        Items of all tasks of a model share batches, because the graph is the same. Metrics of a run count for the
        model's own task; metrics of a request count for the requested task.

        Args:
            requests: `Request` objects of the task, one per input; may be empty.
            timeout_s: Seconds until the last input must have started.
            task: One of `tasks`; None for the model's own task.
            counts_refusals: Whether the metrics count a refusal; a caller that tries again itself sets it to false.
            trace: Records the stages, if the request is traced.

        Raises:
            TooLargeError: The request is larger than the queue, or would need too much memory.
            RefusedError: The queue is full now.
            ExpiredError: The deadline passed.
            InvalidValueError: An input cannot be encoded or decoded; `input_index` is its index.
            EngineError: The graph failed on an input; `input_index` is its index.
            UnavailableError: The service is stopping or broken.
        """
        if not requests:
            return Prediction()
        metrics = self._metrics if task is None or task == self.task else self._metrics.of(task)
        run = RequestRun(requests, TASKS[task or self.task], self._parts, self._scheduler.queue.max_queue_tokens, trace)
        arrived = time.perf_counter()
        try:
            await self._predict(run, timeout_s)
        except RefusedError as error:
            if counts_refusals:
                metrics.refused[error.reason].inc()
            raise
        except ExpiredError:
            metrics.expired.inc()
            raise
        except asyncio.CancelledError:
            metrics.cancelled.inc()
            raise
        prediction = run.prediction
        # in wall clock time, without overlap: so the times of a request with several runs add up too
        started = run.ended if run.started is None else run.started
        prediction.queue_s = max(started - arrived - prediction.tokenize_s, 0.0)
        prediction.inference_s = run.ended - started
        metrics.tokenize_seconds.observe(prediction.tokenize_s)
        metrics.queue_seconds.observe(prediction.queue_s)
        metrics.decode_seconds.observe(prediction.decode_s)
        if prediction.truncated:
            metrics.truncated.inc(len(prediction.truncated))
        return prediction

    async def _predict(self, run: RequestRun, timeout_s: float) -> None:
        """Tokenizes the inputs, queues them, and waits for the results."""
        scheduler = self._scheduler
        arrived = scheduler.clock()
        chars = _chars(run.requests)
        scheduler.check(timeout_s, is_long=chars > SHORT_CHARS)
        if chars <= SHORT_CHARS:  # a thread and back costs more than tokenizing a short text
            run.tokenize()
        else:
            if run.trace is not None:
                run.trace.put(time.perf_counter())
            try:
                async with asyncio.timeout(timeout_s):
                    await scheduler.prepare.run(run.tokenize, chars)
            except TimeoutError as error:
                raise ExpiredError(
                    "the request's deadline passed while its texts waited to be tokenized; allow more time with `x-request-timeout-ms`, "
                    "or send less at once."
                ) from error
        work = run.work() or run.proceed([])
        if work:
            request = ScheduledRequest(self.runner, run.proceed, arrived, arrived + timeout_s)
            await scheduler.run(request, work, run.held_tokens)
            if run.cost.answer_bytes > LARGE_BYTES:
                await scheduler.own_turn()


def _chars(requests: Sequence[Any]) -> int:
    """Returns the characters of all inputs to tokenize.

    Raises:
        TooLargeError: An input has too many.
    """
    chars: list[int] = [request.chars for request in requests]
    if (longest := max(chars)) > MAX_CHARS:
        error = TooLargeError(
            "the input has {chars} characters to tokenize, counted again for each label or choice, and {limit} "
            "are allowed; send fewer or shorter texts at once.",
            chars=longest,
            limit=MAX_CHARS,
        )
        error.input_index = chars.index(longest)
        raise error
    return sum(chars) + TEXT_CHARS * (len(chars) - 1)
