"""All metrics with their names, labels and buckets. Children are created once per model, not per request.

With several workers, each writes its values to files in a shared folder, and any worker answers with the
sums (prometheus_client's multiprocess mode). This mode supports only plain Counter, Gauge and Histogram; a
gauge defines how the values of live workers are combined.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector


class ProcessMetrics(Collector):
    """The metrics `process_*` of every worker, by its index: any worker can answer for all.

    Their sum would be wrong: the CPU seconds of a replaced worker start at 0 again, and only a series per worker shows this as a counter
    reset.
    """

    def __init__(self, process_ids: Sequence[int] = ()) -> None:
        """Creates a collector for the process ids of the workers, by index (0: not running); by default for this process."""
        self._process_ids = process_ids or (os.getpid(),)

    def collect(self) -> Iterable[Metric]:
        """Returns all metric families with their current values."""
        families: dict[str, Metric] = {}
        for index, process_id in enumerate(self._process_ids):
            if not process_id:
                continue
            for metric in ProcessCollector(pid=partial(int, process_id), registry=None).collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {"worker": str(index)}, sample.value)
        return families.values()


# from a run of a short text on a GPU to the default deadline
SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# from a small model on a warm disk to TensorRT engines that must be built
LOAD_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BY_MODEL = ("task", "model")
UNKNOWN = "unknown"

disable_created_metrics()  # type: ignore[no-untyped-call]  # each collector would have a second, unused series


class Metrics:
    """The collectors of one process, in their own registry."""

    def __init__(self, folder: Path | None = None, writer: int | str = 0, process_ids: Sequence[int] = ()) -> None:
        """Creates the collectors. With several workers, the values of all metrics that this process creates from now on are in a folder.

        The names of its files contain the `writer`: `parent`, or the index of the worker, whose files a later worker continues.
        """
        self._registry, self._folder = CollectorRegistry(), folder
        self.processes = ProcessMetrics(process_ids)
        if folder is None:
            self._registry.register(self.processes)
        else:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
            values.ValueClass = values.MultiProcessValue(lambda: writer)  # type: ignore[no-untyped-call]
        self._counter = partial(Counter, namespace="bertserve", registry=self._registry)
        self._sum_gauge = partial(Gauge, namespace="bertserve", registry=self._registry, multiprocess_mode="livesum")
        self._max_gauge = partial(Gauge, namespace="bertserve", registry=self._registry, multiprocess_mode="livemax")
        self._histogram = partial(Histogram, namespace="bertserve", registry=self._registry, buckets=SECONDS_BUCKETS)
        self._create_request_metrics()
        self._create_process_metrics()
        self.http_requests_by_status = cache(lambda status: self.http_requests.labels(str(status)))
        self.requests_by_model = cache(lambda task, model, status: self.requests.labels(task, model, str(status)))
        self.requests_by_key = cache(lambda key, status: self.key_requests.labels(key, str(status)))
        self.model = cache(lambda task, model: ModelMetrics(self, task, model))

    def _create_request_metrics(self) -> None:
        """Creates the metrics of requests and runs."""
        self.http_requests = self._counter(
            "http_requests_total", "HTTP requests by status, including requests that reach no model.", ("status",)
        )
        self.requests = self._counter("requests_total", "Requests to models, by HTTP status.", (*BY_MODEL, "status"))
        self.request_seconds = self._histogram("request_seconds", "Seconds from a request's headers to its answer.", BY_MODEL)
        self.tokenize_seconds = self._histogram("tokenize_seconds", "Seconds to tokenize a request.", BY_MODEL)
        self.queue_seconds = self._histogram(
            "queue_seconds", "Seconds until the first run of a request starts, without tokenizing.", BY_MODEL
        )
        self.inference_seconds = self._histogram("inference_seconds", "Seconds per batch in the graph.", BY_MODEL)
        self.decode_seconds = self._histogram("decode_seconds", "Seconds to decode a request's outputs.", BY_MODEL)
        self.batch_rows = self._histogram("batch_rows", "Rows per batch.", BY_MODEL, buckets=ROWS_BUCKETS)
        self.tokens = self._counter("tokens_total", "Tokens run: tokens of texts (real) and padding (padded).", (*BY_MODEL, "kind"))
        self.multi_threaded_runs = self._counter(
            "multi_threaded_runs_total", "Multi-threaded runs, which happen while other threads are idle.", BY_MODEL
        )
        self.truncated = self._counter("truncated_total", "Inputs that were truncated.", BY_MODEL)
        self.expired = self._counter("expired_total", "Requests whose deadline passed in the queue.", BY_MODEL)
        self.cancelled = self._counter("cancelled_total", "Requests whose client disconnected while they waited.", BY_MODEL)
        self.refused = self._counter("refused_total", "Requests refused at admission, by reason.", (*BY_MODEL, "reason"))
        self._create_score_metrics()
        self.key_requests = self._counter("key_requests_total", "Requests by API key name and HTTP status.", ("key", "status"))
        self.hung_runs = self._counter("hung_runs_total", "Runs that took at least 5 s and 20 times as long as predicted.")

    def _create_score_metrics(self) -> None:
        """Creates the metrics of predictions with calibrated scores, and of the examples that calibrated them."""
        by_score, by_label = ("model", "from_score"), ("model", "label")
        self.scores = self._counter("scores_total", "Predictions by best calibrated score, in bins that start at `from_score`.", by_score)
        self.predictions = self._counter("predictions_total", "Predictions by label, for calibrated models.", by_label)
        self.abstentions = self._counter("abstentions_total", "Inputs without a decision, although one was requested.", ("model",))
        self.reference_scores = self._max_gauge(
            "reference_scores", "Share of the predictions that calibrated the model, by score.", by_score
        )
        self.reference_predictions = self._max_gauge(
            "reference_predictions", "Share of the predictions that calibrated the model, by label.", by_label
        )

    def _create_process_metrics(self) -> None:
        """Creates the metrics of the queue, the threads and the models."""
        self.queue_items = self._sum_gauge("queue_items", "Items waiting in the queue.")
        self.queue_tokens = self._sum_gauge(
            "queue_tokens", "Tokens that open requests hold of --max-queue-tokens: waiting, running and reserved."
        )
        self.threads = self._sum_gauge("threads", "Inference threads: batches that can run at once.")
        self.thread_busy = self._counter(
            "thread_busy_seconds_total", "Seconds in which inference threads had a batch (run and decoding), summed over threads."
        )
        self.loop_cpu = self._counter("event_loop_cpu_seconds_total", "CPU seconds of the event loop, summed over workers.")
        self.loop_lag = self._histogram("event_loop_lag_seconds", "Delay of the event loop in seconds, sampled once per second.")
        self.workers = self._max_gauge("workers", "Configured workers.")
        self.ready_workers = self._sum_gauge("ready_workers", "Workers that accept requests.")
        self.workers_replaced = self._counter("workers_replaced_total", "Workers replaced because they exited or hung.", ("reason",))
        for reason in ("ended", "hung"):
            self.workers_replaced.labels(reason)  # a series from the start, whose first increase can be seen
        self.build_info = self._max_gauge(
            "build_info", "Always 1; the labels hold the versions.", ("version", "onnxruntime", "python", "provider")
        )
        self.model_info = self._max_gauge("model_info", "1 for each loaded model.", ("model", "version", "precision", "provider"))
        self.broken_models = self._max_gauge(
            "broken_models", "1 for each model that could not be loaded, at a start with --skip-broken or at a reload.", ("model",)
        )
        self.load_seconds = self._histogram(
            "model_load_seconds",
            "Seconds per step of loading a model: files verified (verify), sessions created and warmed up (load).",
            ("model", "step", "outcome"),
            buckets=LOAD_SECONDS_BUCKETS,
        )

    @contextmanager
    def time_load(self, model: str, step: str) -> Iterator[None]:
        """Records the seconds of the block as a step of loading a model, with the outcome `ok`, or `failed` after an error."""
        outcome = "failed"
        with self.load_seconds.time() as timer:
            try:
                yield
                outcome = "ok"
            finally:
                timer.labels(model, step, outcome)

    def record_request(self, task: str, model: str, status: int, seconds: float) -> None:
        """Counts a request; the duration counts only for a known model."""
        self.requests_by_model(task, model, status).inc()
        if model != UNKNOWN:
            self.model(task, model).request_seconds.observe(seconds)

    def forget_reference(self, model: str) -> None:
        """Sets the reference of a model to NaN: it is unloaded or replaced. Workers cannot remove a series, and 0 would look like drift."""
        for gauge in (self.reference_scores, self.reference_predictions):
            for sample in [sample for family in gauge.collect() for sample in family.samples]:
                if sample.labels["model"] == model:
                    gauge.labels(**sample.labels).set(math.nan)

    def render(self) -> bytes:
        """Returns the metrics of all workers in Prometheus' text format."""
        if self._folder is None:
            return generate_latest(self._registry)
        all_workers = CollectorRegistry()
        MultiProcessCollector(all_workers, str(self._folder))  # type: ignore[no-untyped-call]
        all_workers.register(self.processes)
        return generate_latest(all_workers)


class ModelMetrics:
    """The children of one model."""

    def __init__(self, metrics: Metrics, task: str, model: str) -> None:
        labels = (task, model)
        self._metrics, self._model = metrics, model
        self.request_seconds = metrics.request_seconds.labels(*labels)
        self.tokenize_seconds = metrics.tokenize_seconds.labels(*labels)
        self.queue_seconds = metrics.queue_seconds.labels(*labels)
        self.inference_seconds = metrics.inference_seconds.labels(*labels)
        self.decode_seconds = metrics.decode_seconds.labels(*labels)
        self.batch_rows = metrics.batch_rows.labels(*labels)
        self.tokens_real = metrics.tokens.labels(*labels, "real")
        self.tokens_padded = metrics.tokens.labels(*labels, "padded")
        self.multi_threaded_runs = metrics.multi_threaded_runs.labels(*labels)
        self.truncated = metrics.truncated.labels(*labels)
        self.expired = metrics.expired.labels(*labels)
        self.cancelled = metrics.cancelled.labels(*labels)
        self.refused = {reason: metrics.refused.labels(*labels, reason) for reason in ("queue_full", "deadline")}
        self._by_score: list[Counter] = []
        self._by_label = cache(lambda label: metrics.predictions.labels(model, label))

    def for_task(self, task: str) -> "ModelMetrics":
        """Returns the children of the same model for another task that it answers."""
        return self._metrics.model(task, self._model)

    def set_reference(self, counts: Sequence[int], label_counts: Mapping[str, int]) -> None:
        """Sets the numbers of predictions that calibrated the model, in equal bins of scores from 0 to 1, and by label; empty for none."""
        metrics, model = self._metrics, self._model
        metrics.forget_reference(model)
        if not counts:  # a calibrated version of the model can still answer, and needs its bins
            return
        starts = [f"{i / len(counts):g}" for i in range(len(counts))]
        self._by_score = [metrics.scores.labels(model, start) for start in starts]
        for start, count in zip(starts, counts, strict=True):
            metrics.reference_scores.labels(model, start).set(count / max(sum(counts), 1))
        metrics.abstentions.labels(model)  # a series from the start, whose first increase can be seen
        for label, count in label_counts.items():
            self._by_label(label)
            metrics.reference_predictions.labels(model, label).set(count / max(sum(label_counts.values()), 1))

    def count_predictions(self, predictions: Iterable[tuple[Sequence[str], float]], abstentions: int) -> None:
        """Counts predictions, each with its labels and its best calibrated score, and inputs without the decision that was requested."""
        bins = self._by_score
        for labels, score in predictions:
            bins[min(int(score * len(bins)), len(bins) - 1)].inc()
            for label in labels:
                self._by_label(label).inc()
        if abstentions:
            self._metrics.abstentions.labels(self._model).inc(abstentions)
