"""Model: answers requests with a bundle's tokenizer, engine and task. It uses the scheduler, but no threads and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine.cost import CostModel
from bertserve.service.engine.engines import Engines
from bertserve.service.engine.onnx_engine import Row
from bertserve.service.errors import BertServeError, ExpiredError, RefusedError, TooLargeError
from bertserve.service.metrics import ModelMetrics
from bertserve.service.models.work import Prediction, RequestRun, TaskInput, Work, trace_run
from bertserve.service.scheduling.request_queue import LONG_STEP_S
from bertserve.service.scheduling.scheduled_request import ScheduledRequest
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.scheduling.stage import RequestResult, Stage
from bertserve.service.tasks.batch import PAUSE, TaskModel
from bertserve.service.tasks.catalog import TASKS, tasks_of
from bertserve.service.tasks.cost import MAX_CHARS, TEXT_CHARS
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import SHORT_CHARS, Tokenizer
from bertserve.service.tracing.trace import Trace

logger = logging.getLogger("bertserve.model")

# Limit of a run's logits over the vocabulary: 8 MiB, and the same again while the bias is added. One text with 64 masks fits if the
# vocabulary has 32,768 tokens; the logits of a full batch of masks would need gigabytes.
MAX_LOGITS = 2**21
# Limit of a run's attention weights, which are in memory twice, 16 MiB each. The weights of one text may be a quarter of it.
MAX_WEIGHTS = 2**22
# Seconds of an inference thread to tokenize one character (docs/explanation/scheduling.md). Some texts take up to 40 times as long: WordPiece
# is quadratic within a word of up to 100 letters, and a Korean syllable becomes three letters.
SECONDS_PER_CHAR, SLOWEST_SECONDS_PER_CHAR = 3e-7, 1.25e-5
# A text with more characters can take longer than LONG_STEP_S.
LONG_CHARS = round(LONG_STEP_S / SLOWEST_SECONDS_PER_CHAR)
# Seconds for which a thread tokenizes or decodes one request before other requests get a turn.
SLICE_S = 0.005
# Shorter waits are not compared with their predictions, because they matter to no caller.
LEAST_WAIT_S = 0.01


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
        self._tokenizer = tokenizer
        self.engines = engines
        self._cost = cost
        self._scheduler = scheduler
        self._metrics = metrics
        name, version, precision, provider = self.labels
        self._described = {"model": name, "model.version": version, "task": self.task, "precision": precision, "provider": provider}
        self._fills_masks = any(output.kind == "per_mask" for output in graph.outputs)
        self._gives_attentions = graph.gives_attentions
        # not the model itself: a cycle would never be freed, because the server excludes the objects of its start from collections
        self._key = object() if graph.batch_invariant or batch_variant else None

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
        spec = TASKS[task or self.task]
        chars_of_inputs: list[int] = [request.chars for request in requests]
        if (most := max(chars_of_inputs)) > MAX_CHARS:
            raise _too_many_chars(most, chars_of_inputs.index(most))
        chars = sum(chars_of_inputs) + TEXT_CHARS * (len(requests) - 1)
        tokens, seconds, items = self._estimate(requests, spec, chars)
        run = RequestRun(requests, spec, TaskModel(self._tokenizer, self.bundle.manifest), trace)
        try:
            scheduled = self._scheduler.admit(tokens=tokens, seconds=seconds, timeout_s=timeout_s, items=items)
            done = await self._run_request(scheduled, run, chars)
        except (RefusedError, ExpiredError, asyncio.CancelledError) as error:
            if counts_refusals or not isinstance(error, RefusedError):
                _count(metrics, error)
            raise
        _observe(metrics, done)
        prediction: Prediction = done.value
        return prediction

    async def _run_request(self, scheduled: ScheduledRequest, run: RequestRun, chars: int) -> RequestResult:
        """Runs an admitted request, or closes it if its texts cannot be tokenized."""
        if chars <= SHORT_CHARS:  # switching to an inference thread and back costs more than tokenizing a short text
            try:
                stage = self._tokenize(run)
            except BaseException:
                self._scheduler.close(scheduled)
                raise
        else:
            if run.trace is not None:
                run.trace.put(time.perf_counter())
            long_step = run.requests[0].chars > LONG_CHARS
            stage = _paused(partial(self._tokenize, run), delay_s=chars * SECONDS_PER_CHAR, long_step=long_step)
        return await self._scheduler.run(scheduled, stage)

    def _estimate(self, requests: Sequence[Any], spec: TaskSpec, chars: int) -> tuple[int, float, int]:
        """Returns rough estimates of the request's tokens, seconds and items; longer texts count as several windows."""
        longest = self._tokenizer.max_length
        tokens = [spec.estimate(request, longest) for request in requests]
        seconds = sum(self._cost.seconds(1, min(n, longest)) * max(1, n / longest) for n in tokens)
        return sum(tokens), seconds + chars * SECONDS_PER_CHAR, sum(-(-n // longest) for n in tokens)

    def _tokenize(self, run: RequestRun) -> Stage:
        """Starts the task of each input until its first batch; returns the stage that runs these batches, or one that continues here."""
        start = end = time.perf_counter()
        prediction = run.prediction
        while (index := len(run.inputs)) < len(run.requests):
            # the scheduler knows only the first text of a slice, so another text that can take a long step starts a new slice
            if end > start and (end - start > SLICE_S or (run.paused_task is None and run.requests[index].chars > LONG_CHARS)):
                chars = run.requests[index].chars
                prediction.tokenize_s += end - start
                if run.trace is not None:
                    run.trace.note("tokenize", start, end, waits=True)
                return _paused(partial(self._tokenize, run), delay_s=chars * SECONDS_PER_CHAR, long_step=chars > LONG_CHARS)
            task = run.paused_task or run.spec.run(run.requests[index], run.model)
            try:
                batch = next(task)
            except BertServeError as error:
                error.input_index = index
                raise
            run.paused_task = task if batch is PAUSE else None
            if batch is PAUSE:
                end = time.perf_counter()
                continue
            run.inputs.append(TaskInput(task, batch))
            prediction.tokens += batch.tokens
            prediction.warnings += [(index, warning) for warning in batch.warnings]
            if batch.truncated:
                prediction.truncated.append(index)
            run.cost = batch.cost if index == 0 else run.cost + batch.cost
            run.reserved_tokens = run.cost.queue_tokens
            # checked after each input, because the windows of one text may have a thousand times as many tokens as the text
            if (tokens := prediction.tokens + run.reserved_tokens) > self._scheduler.max_queue_tokens:
                raise _larger_than_queue(tokens, self._scheduler.max_queue_tokens)
            run.cost.check()
            end = time.perf_counter()
        prediction.tokenize_s += end - start
        if run.trace is not None:
            run.trace.note("tokenize", start, end, waits=True)
        prediction.read = run.inputs[0].batch.read if len(run.inputs) == 1 else ()
        run.open = list(range(len(run.inputs)))
        return self._stage(run)

    def _stage(self, run: RequestRun) -> Stage:
        """Returns the stage that runs one batch for each open input."""
        work = [
            Work(encoding, index, None if (keep := run.inputs[index].batch.keep) is None else partial(keep, place), run.trace)
            for index in run.open
            for place, encoding in enumerate(run.inputs[index].batch.encodings)
        ]
        return Stage(
            work=[(item.encoding.cost_tokens, item) for item in work],
            run=self._run,
            finish=partial(self._receive, run),
            key=self._key,
            cost=self._cost.seconds,
            reserved_tokens=run.reserved_tokens,
            shape=self.graph.shape,
            run_multi_threaded=partial(self._run, multi_threaded=True),
        )

    def _receive(self, run: RequestRun, rows: Sequence[Row]) -> Prediction | Stage:
        """Sends each open input its rows; returns the prediction, the stage of the next batches, or one that continues decoding."""
        remaining = iter(rows)
        run.ready.extend((index, list(islice(remaining, len(run.inputs[index].batch.encodings)))) for index in run.open)
        run.open = []
        return self._decode(run)

    def _decode(self, run: RequestRun) -> Prediction | Stage:
        """Continues the inputs that have rows, until the time slice ends."""
        start = end = time.perf_counter()
        prediction = run.prediction
        while run.ready and end - start <= SLICE_S:
            index, rows = run.ready.popleft()
            item = run.inputs[index]
            try:
                item.batch = item.run.send(rows)
                run.cost += item.batch.cost
                run.cost.check()
            except StopIteration as ended:
                item.result = ended.value
            except BertServeError as error:
                error.input_index = index
                raise
            else:
                if item.batch.encodings:
                    run.open.append(index)
                    prediction.tokens += item.batch.tokens
                else:
                    run.ready.appendleft((index, []))
            end = time.perf_counter()
        prediction.decode_s += end - start
        if run.trace is not None:
            run.trace.note("decode", start, end, waits=bool(run.ready or run.open))
        if run.ready:
            return _paused(partial(self._decode, run), run.reserved_tokens)
        if run.open:
            run.reserved_tokens = sum(run.inputs[index].batch.cost.queue_tokens for index in run.open)
            return self._stage(run)
        prediction.results = [item.result for item in run.inputs]
        return prediction

    def _run(self, works: Sequence[Work], *, multi_threaded: bool = False) -> list[Row]:
        if len(works) > 1 and self._gives_too_much(works):
            half = len(works) // 2
            return [*self._run(works[:half], multi_threaded=multi_threaded), *self._run(works[half:], multi_threaded=multi_threaded)]
        lengths = [len(work.encoding.ids) for work in works]
        height, width = len(works), max(lengths)
        if self.graph.shapes is not None:
            height, width = self.graph.shapes.shape(height, width) or (height, width)
        engine = self.engines.for_multi_threaded_run(height * width) if multi_threaded else self.engines.single_threaded
        is_single_threaded = engine is self.engines.single_threaded
        traces = [work.trace for work in works if work.trace is not None]
        start, start_busy = time.perf_counter(), time.thread_time()
        try:
            rows = engine.run([work.encoding for work in works])
        except BertServeError as error:
            if len(works) == 1:
                error.input_index = works[0].input_index
            if traces:
                trace_run(traces, self._described, lengths, height * width, start=start, multi_threaded=not is_single_threaded, error=error)
            raise
        seconds, busy_s = time.perf_counter() - start, time.thread_time() - start_busy
        try:
            if is_single_threaded:
                # on the CPU the inference thread does all the work of its run; for another device it waits
                self._cost.observe(height, width, seconds, busy_s if self.graph.provider == "cpu" else None)
            else:
                self._metrics.multi_threaded_runs.inc()
            self._metrics.inference_seconds.observe(seconds)
            self._metrics.batch_rows.observe(len(works))
            self._metrics.tokens_real.inc(sum(lengths))
            self._metrics.tokens_padded.inc(height * width - sum(lengths))
            if traces:
                trace_run(traces, self._described, lengths, height * width, start=start, multi_threaded=not is_single_threaded)
        except Exception as error:  # noqa: BLE001 - the results are delivered even if the metrics fail
            logger.error("cannot count a run of `%s`: %s", self.name, type(error).__name__)
        if len(rows) != len(works):
            return rows  # the scheduler refuses them
        return [row if work.keep is None else work.keep(row) for work, row in zip(works, rows, strict=True)]

    def _gives_too_much(self, works: Sequence[Work]) -> bool:
        """Returns whether a run would return too many logits over the vocabulary or attention weights at the same time."""
        if self._fills_masks and sum(len(work.encoding.masks) for work in works) * self._tokenizer.vocabulary_size > MAX_LOGITS:
            return True
        maps = sum(len(work.encoding.maps) for work in works) if self._gives_attentions else 0
        return maps * max(len(work.encoding.ids) for work in works) ** 2 > MAX_WEIGHTS


def _too_many_chars(chars: int, index: int) -> TooLargeError:
    error = TooLargeError(
        "the input has {chars} characters to tokenize, counted again for each label or choice, and {limit} "
        "are allowed; send fewer or shorter texts at once.",
        chars=chars,
        limit=MAX_CHARS,
    )
    error.input_index = index
    return error


def _larger_than_queue(tokens: int, max_queue_tokens: int) -> TooLargeError:
    return TooLargeError(
        "the request has at least {tokens} tokens, including all windows and decoding, and the queue holds "
        "{most}; send fewer or shorter texts at once, make `stride`, `beam` or `top_k` smaller, or remove "
        "`explain`; the operator can raise --max-queue-tokens.",
        tokens=tokens,
        most=max_queue_tokens,
    )


def _count(metrics: ModelMetrics, error: BaseException) -> None:
    """Counts a request that failed for a reason other than its content."""
    if isinstance(error, RefusedError):
        metrics.refused[error.reason].inc()
    elif isinstance(error, ExpiredError):
        metrics.expired.inc()
    else:
        metrics.cancelled.inc()


def _observe(metrics: ModelMetrics, done: RequestResult) -> None:
    """Records the times of an answered request in its prediction and in the metrics."""
    prediction: Prediction = done.value
    # in wall clock time, without overlap: so the times of a request with several runs add up too
    prediction.queue_s, prediction.inference_s = max(done.wait_s - prediction.tokenize_s, 0.0), done.runs_s
    metrics.tokenize_seconds.observe(prediction.tokenize_s)
    metrics.queue_seconds.observe(done.queue_s)
    if max(done.predicted_wait_s, done.wait_s) >= LEAST_WAIT_S:
        metrics.wait_prediction_ratio.observe(done.predicted_wait_s / max(done.wait_s, 1e-3))
    metrics.decode_seconds.observe(prediction.decode_s)
    metrics.truncated.inc(len(prediction.truncated))


def _paused(
    proceed: Callable[[], Any],
    reserved_tokens: int | None = None,
    *,
    delay_s: float = 0.0,
    long_step: bool = False,
) -> Stage:
    """Returns a stage that continues on an inference thread, after other requests with an earlier priority.

    Args:
        proceed: Continues the work; returns the next stage or the value.
        reserved_tokens: Tokens that stay reserved until then; None for the estimate of admission.
        delay_s: Predicted seconds of `proceed`, if it cannot be interrupted.
        long_step: Whether `proceed` can take longer than `LONG_STEP_S` without interruption.
    """
    return Stage(
        work=[(0, None)],
        run=lambda payloads: payloads,
        finish=lambda _: proceed(),
        key=None,
        cost=lambda rows, length: 0.0,
        keep_estimate=reserved_tokens is None,
        reserved_tokens=reserved_tokens or 0,
        expires=reserved_tokens is None,
        delay_s=delay_s,
        long_step=long_step,
    )
