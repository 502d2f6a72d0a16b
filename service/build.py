"""The composition root: builds all parts of the service from the settings."""

import logging
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from bertserve.service import __version__
from bertserve.service.app_state import AppState
from bertserve.service.auth import Authenticator
from bertserve.service.body.task_body import Limits
from bertserve.service.bundle import files
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import usable_cores
from bertserve.service.errors import SettingsError
from bertserve.service.messages import plural
from bertserve.service.metrics import Metrics
from bertserve.service.models import loading
from bertserve.service.models.prepare_pool import PreparePool
from bertserve.service.models.registry import Registry
from bertserve.service.models.reloader import Reloader
from bertserve.service.monitor import Monitor
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.settings import Settings

if TYPE_CHECKING:
    from bertserve.service.tracing import Tracer

logger = logging.getLogger("bertserve.loading")


def build(
    settings: Settings,
    auth: Authenticator | None = None,
    *,
    index: int = 0,
    metrics: Metrics | None = None,
    beat: Callable[[], None] = lambda: None,
) -> AppState:
    """Loads every bundle of the models folder and builds the service; it starts no threads.

    Settings are totals over all workers; the worker with this index gets its share of threads and queue. By default, no route needs a key,
    model management is disabled, and `metrics` belong to a single process. `Monitor` calls `beat` once per second.

    Raises:
        StartError: A bundle, the provider or a setting is wrong; the message says which.
    """
    metrics = metrics or Metrics()
    paths = files.find_bundles(settings.models)
    model_settings = loading.with_provider(settings, paths)
    provider = model_settings.provider
    on_cpu, cores = provider == "cpu", usable_cores()
    # two threads keep a GPU busy: one prepares a batch while the other one's runs
    total_threads = max(settings.threads or (cores if on_cpu else 2), settings.workers)
    threads = _share(total_threads, settings.workers, index)
    metrics.build_info.labels(__version__, sessions.VERSION, platform.python_version(), provider).set(1)
    metrics.workers.set(settings.workers)
    metrics.threads.set(threads)
    queue = _queue(settings, index, threads, settings.batch_tokens("fp32" if on_cpu or settings.precision == "fp32" else "fp16"))
    # a GPU runs texts faster than two threads tokenize them
    prepare_threads = min(cores, 2) if on_cpu else max(cores // 2 // settings.workers, 1)
    scheduler = Scheduler(queue, PreparePool(prepare_threads).submit, on_hang=metrics.hung_runs.inc)
    load = partial(loading.load_model, settings=model_settings, scheduler=scheduler, metrics=metrics)
    registry = Registry(settings, metrics)
    reloader = Reloader(settings, load, registry)
    reloader.start(paths, parallel_loads=threads)
    if not on_cpu:
        own_threads = f"{plural(threads, 'inference thread')} and {plural(prepare_threads, 'prepare thread')}"
        batch_tokens = max(model.max_batch_tokens for model in registry.models.values())
        logger.info("GPU %d: %s of this worker, batches of up to %d tokens", settings.device_id, own_threads, batch_tokens)
    return AppState(
        registry=registry,
        reloader=reloader,
        scheduler=scheduler,
        monitor=Monitor(scheduler, metrics, beat),
        metrics=metrics,
        settings=settings,
        provider=provider,
        limits=Limits(settings.max_inputs, settings.max_chars, settings.max_top_k),
        auth=auth or Authenticator(),
        worker_index=index,
        total_threads=total_threads,
        tracer=_tracer(settings.otlp_endpoint),
    )


def _queue(settings: Settings, index: int, threads: int, batch_tokens: int) -> RequestQueue:
    """Returns the queue of the worker with this index.

    Raises:
        SettingsError: It is smaller than a batch.
    """
    queue_tokens = _share(settings.max_queue_tokens, settings.workers, index)
    if batch_tokens > queue_tokens:
        raise SettingsError(
            f"--max-queue-tokens is {settings.max_queue_tokens}, which gives this worker {queue_tokens}, less than --max-batch-tokens, "
            f"which is {batch_tokens}; raise the first or lower the second."
        )
    # more than four threads save little time per run, and the next caller finds all their cores busy
    return RequestQueue(max_queue_tokens=queue_tokens, threads=threads, threads_per_run=settings.multi_threads or min(threads, 4))


def _tracer(endpoint: str | None) -> "Tracer | None":
    """Returns a tracer that sends to a collector; None without an endpoint, or if OTEL_SDK_DISABLED is set."""
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    from bertserve.service.tracing import Tracer  # noqa: PLC0415 - an extra

    return Tracer(endpoint)


def _share(total: int, workers: int, index: int) -> int:
    """Returns a worker's part of a total of at least `workers`. All parts add up to the total, and differ by at most 1."""
    part, rest = divmod(total, workers)
    return part + (index < rest)
