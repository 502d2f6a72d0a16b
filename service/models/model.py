"""Model: answers requests with a bundle's tokenizer, graph and tasks, and runs their texts for the scheduler. It starts no threads."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.model_engines import ModelEngines
from bertserve.service.errors import BertServeError, ExpiredError, RefusedError
from bertserve.service.metrics import ModelMetrics
from bertserve.service.models.batch_run import run_within_limits
from bertserve.service.models.request_progress import EncodingItem, Prediction, RequestProgress
from bertserve.service.scheduling.records import ScheduledRequest
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.settings import ModelSettings
from bertserve.service.tasks.catalog import TASKS, answered_tasks
from bertserve.service.tasks.cost import total_chars
from bertserve.service.tasks.step import TaskModel
from bertserve.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan


class Model:
    """A loaded model: it answers requests on the event loop, and runs their texts on inference threads, as the scheduler's `Runner`.

    `tasks` are the Hugging Face names of all tasks that it answers, its own `task` first. `metric_labels` are its name, version, precision
    and provider, as in the metric `model_info`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        tokenizer: Tokenizer,
        engines: ModelEngines,
        cost_model: CostModel,
        scheduler: Scheduler,
        metrics: ModelMetrics,
        settings: ModelSettings,
    ) -> None:
        """Combines the parts of a model.

        The scheduler belongs to the engines' device. `cost_model` predicts the seconds of a run on an inference thread, and
        learns from each run.
        """
        self.bundle = bundle
        self.name = bundle.manifest.name
        self.task: str = bundle.manifest.task
        self.tasks = answered_tasks(bundle.manifest)
        self.graph = graph = engines.single_threaded.graph
        self.engines = engines
        self.max_batch_tokens = settings.batch_tokens(graph.precision)
        self.shares_batches = graph.batch_invariant or settings.batch_variant_graphs
        self.predict_seconds = cost_model.predict_seconds  # as methods, these two would cost every item further calls
        self.padded_shape = graph.padded_shape
        self.metric_labels = (self.name, bundle.version, graph.precision, graph.provider)
        self._task_model = TaskModel(tokenizer, bundle.manifest, graph.calibration)
        if graph.calibration is None:
            metrics.set_reference((), {})
        else:
            metrics.set_reference(graph.calibration.score_counts, graph.calibration.label_counts)
        self._cost_model = cost_model
        self._scheduler = scheduler
        self._metrics = metrics
        self._vocabulary_size = tokenizer.vocabulary_size

    async def predict(
        self,
        inputs: Sequence[Any],
        *,
        timeout_s: float,
        task: str | None = None,
        counts_refusals: bool = True,
        trace: "RequestSpan | None" = None,
    ) -> Prediction:
        """Answers either all inputs of one request or none. If the coroutine is cancelled, its items leave the queue.

        Items of all tasks of a model share batches, because the graph is the same. Metrics of a run count for the
        model's own task; metrics of a request count for the requested task.

        Args:
            inputs: The inputs of the task, as `TaskBody.task_inputs` returns them; can be empty.
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
        if not inputs:
            return Prediction()
        metrics = self._metrics if task is None or task == self.task else self._metrics.for_task(task)
        spec = TASKS[task or self.task]
        generators = [spec.function(input_, self._task_model) for input_ in inputs]
        chars = total_chars([input_.chars for input_ in inputs])
        progress = RequestProgress(generators, self._scheduler.queue.max_request_tokens, chars, trace)
        start, arrived = time.perf_counter(), self._scheduler.clock()
        request = ScheduledRequest(self, progress, arrived, arrived + timeout_s)
        try:
            await self._scheduler.handle(request)
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
        prediction = progress.complete(start)
        metrics.tokenize_seconds.observe(prediction.tokenize_s)
        metrics.queue_seconds.observe(prediction.queue_s)
        metrics.decode_seconds.observe(prediction.decode_s)
        if prediction.truncated:
            metrics.truncated.inc(len(prediction.truncated))
        if prediction.scored_labels or prediction.abstentions:
            self._metrics.count_predictions(prediction.scored_labels, prediction.abstentions)
        return prediction

    def run(self, items: Sequence[EncodingItem], *, multi_threaded: bool = False) -> Sequence[Outputs]:
        """Returns the outputs of each text that its task keeps.

        Raises:
            EngineError: The graph fails; `input_index` is the index of the input, if there is one text.
        """
        lengths = [len(item.encoding.ids) for item in items]
        rows, length = self.graph.padded_shape(len(items), max(lengths)) or (len(items), max(lengths))
        single = self.engines.single_threaded
        engine = self.engines.for_multi_threaded_run(rows * length) if multi_threaded else single
        start = time.perf_counter()
        for item in items:
            if item.progress.started is None:
                item.progress.started = start
        error = None
        try:
            outputs = run_within_limits(engine, items, self._vocabulary_size)
        except BertServeError as caught:
            error = caught
            if len(items) == 1:
                error.input_index = items[0].input_index
            raise
        finally:
            end = time.perf_counter()
            if any(item.progress.trace is not None for item in items):
                self._trace(items, rows * length, start, end, multi_threaded=engine is not single, error=error)
        seconds = end - start
        if engine is single:
            self._cost_model.observe(rows, length, seconds)
        else:
            self._metrics.multi_threaded_runs.inc()
        self._metrics.inference_seconds.observe(seconds)
        self._metrics.batch_rows.observe(len(items))
        self._metrics.tokens_real.inc(sum(lengths))
        self._metrics.tokens_padded.inc(rows * length - sum(lengths))
        return outputs

    def _trace(
        self, items: Sequence[EncodingItem], padded: int, start: float, end: float, *, multi_threaded: bool, error: Exception | None
    ) -> None:
        """Records a span of a batch, for the traced requests in it."""
        name, version, precision, provider = self.metric_labels
        traces = list(dict.fromkeys(item.progress.trace for item in items if item.progress.trace is not None))
        real = sum(len(item.encoding.ids) for item in items)
        model = {"model": name, "model.version": version, "task": self.task, "precision": precision, "provider": provider}
        batch = {"rows": len(items), "tokens": real, "padded_tokens": padded - real, "multi_threaded": multi_threaded}
        attributes: dict[str, Any] = {f"bertserve.{key}": value for key, value in model.items()}
        attributes |= {f"bertserve.batch.{key}": value for key, value in batch.items()}
        kind = None if error is None else type(error).__name__
        traces[0].tracer.record_batch(traces, f"batch {name}", start, end, attributes=attributes, error=kind)
