"""The composition root: builds all parts of the service from the settings. No other module of this layer uses the settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bertserve.service.bundle import files
from bertserve.service.bundle.validation_policy import ValidationPolicy
from bertserve.service.engine import sessions
from bertserve.service.engine.engines import MAX_MULTI_THREADS
from bertserve.service.engine.hardware import cpu_name, usable_cores
from bertserve.service.errors import BundleError, StartError
from bertserve.service.metrics import Metrics
from bertserve.service.models import loading
from bertserve.service.models.loading import LoadOptions
from bertserve.service.models.registry import Registry, check_defaults, wanted_defaults
from bertserve.service.models.reloader import Reloader, without_folders
from bertserve.service.models.utilization import Utilization
from bertserve.service.providers import Provider
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.settings import ModelSettings, Settings
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import tasks_of

if TYPE_CHECKING:
    from bertserve.service.tracing.tracer import Tracer

logger = logging.getLogger("bertserve.loading")

T = TypeVar("T")

# Models that load at the same time: while a model loads, it needs memory for its file in addition to its sessions.
MAX_LOADING = 4


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """A worker and its share of the limits, for `/info`."""

    index: int
    workers: int
    pid: int
    max_queue_tokens: int
    threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What models run on, for `/info`.

    Attributes:
        cpu: The CPU model.
        onnxruntime: Version of ONNX Runtime.
        provider_asked: The execution provider that the operator requested, or `auto` chose.
        provider: The execution provider in use.
        threads_per_run: Intra-op threads of a run, except for multi-threaded runs.
    """

    cpu: str
    onnxruntime: str
    provider_asked: Provider
    provider: Provider
    threads_per_run: int


@dataclass(frozen=True, slots=True)
class AppState:
    """The state that request handlers use, built by the composition root.

    Attributes:
        registry: The loaded models.
        scheduler: The inference threads.
        metrics: All metrics.
        utilization: Measures how busy the threads are.
        settings: All settings.
        limits: The limits of a body.
        reloader: Changes the models.
        totals: The limits of all workers together.
        worker: This worker and its share.
        machine: What models run on.
        broken: Name -> error, for models that could not be loaded.
        tracer: Records requests; None if tracing is disabled.
    """

    registry: Registry
    scheduler: Scheduler
    metrics: Metrics
    utilization: Utilization
    settings: Settings
    limits: Limits
    reloader: Reloader
    totals: dict[str, int]
    worker: WorkerShare
    machine: Machine
    broken: Mapping[str, str] = field(default_factory=dict)
    tracer: Tracer | None = None


def build(settings: Settings, *, index: int = 0, metrics: Metrics | None = None, tracer: Tracer | None = None) -> AppState:
    """Loads every bundle of the models folder and builds the service; it starts no threads.

    The settings have totals over all workers; the worker with this index gets its share of threads and queue. By default, `metrics` are
    those of a single process.

    Raises:
        StartError: A bundle, the provider or a setting is wrong; the message says which.
    """
    metrics = metrics or Metrics()
    broken: dict[str, str] = {}
    skipped = broken if settings.skip_broken else None
    verify = partial(loading.verify, metrics=metrics)
    bundles = _loaded(verify, files.find_bundles(settings.models), skipped, at_once=usable_cores())
    requested = loading.choose_provider(bundles, settings.provider)
    provider = loading.obtain_provider(requested, allow_fallback=settings.allow_provider_fallback)
    threads_total = _threads_of_all(settings, provider)
    threads = _share(threads_total, settings.workers, index)
    metrics.describe_build(onnxruntime=sessions.VERSION, provider=provider, workers=settings.workers, threads=threads)
    multi_threads = settings.multi_threads or min(threads, MAX_MULTI_THREADS)
    scheduler = _scheduler(settings, provider, threads, multi_threads, index=index, metrics=metrics)
    options = load_options(settings, requested, provider, multi_threads)
    load = partial(loading.load_model, options=options, scheduler=scheduler, metrics=metrics)
    models = _loaded(load, bundles, skipped, at_once=threads)
    if not models:
        raise BundleError(f"no model can be loaded: {'; '.join(broken.values())}")
    for name in broken:
        metrics.broken_models.labels(name).set(1)
    answered = {model.name: model.tasks for model in models}
    defaults = wanted_defaults(settings.default, settings.models, answered, broken)
    registry = Registry(models, defaults, by_name=settings.allow_implicit_default)
    return AppState(
        registry=registry,
        broken=broken,
        reloader=Reloader(
            settings.models,
            load,
            registry=registry,
            broken=broken,
            metrics=metrics,
            check_start=partial(check_next_start, settings, broken),
            workers=settings.workers,
        ),
        scheduler=scheduler,
        metrics=metrics,
        utilization=Utilization(scheduler, metrics),
        tracer=tracer,
        settings=settings,
        limits=Limits(settings.max_inputs, settings.max_chars, settings.max_top_k),
        totals={"max_batch_tokens": settings.max_batch_tokens, "max_queue_tokens": settings.max_queue_tokens, "threads": threads_total},
        worker=WorkerShare(index, settings.workers, os.getpid(), scheduler.queue.max_queue_tokens, threads),
        machine=Machine(cpu_name(), sessions.VERSION, requested, provider, sessions.THREADS),
    )


def _scheduler(settings: Settings, provider: Provider, threads: int, multi_threads: int, *, index: int, metrics: Metrics) -> Scheduler:
    """Returns the scheduler of a worker, with its share of the queue."""
    return Scheduler(
        RequestQueue(
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_tokens=_share(settings.max_queue_tokens, settings.workers, index),
            threads=threads,
        ),
        threads=threads,
        multi_threads=multi_threads,
        # a GPU runs texts faster than two threads tokenize them
        prepare_threads=min(usable_cores(), 2 if provider == "cpu" else 8),
        on_hang=metrics.hung_runs.inc,
    )


def _threads_of_all(settings: Settings, provider: Provider) -> int:
    """Returns the number of inference threads of all workers; each worker has at least one."""
    return max(settings.threads or (usable_cores() if provider == "cpu" else 1), settings.workers)


def _share(total: int, workers: int, index: int) -> int:
    """Returns a worker's part of a total of at least `workers`. All parts add up to the total, and differ by at most 1."""
    part, rest = divmod(total, workers)
    return part + (index < rest)


def load_options(settings: ModelSettings, requested_provider: Provider, provider: Provider, multi_threads: int = 1) -> LoadOptions:
    """Returns the options of loading from the settings, the provider that was requested or chosen, and the one in use."""
    return LoadOptions(
        provider=provider,
        provider_asked=requested_provider,
        precision=settings.precision,
        batch_variant=settings.batch_variant_graphs,
        max_batch_tokens=settings.max_batch_tokens,
        engine_cache=settings.engine_cache,
        multi_threads=multi_threads,
        validation_policy=ValidationPolicy(settings.require_validation, settings.min_agreement),
    )


def _loaded(load: Callable[[Any], T], sources: Sequence[Any], broken: dict[str, str] | None, *, at_once: int) -> list[T]:
    """Returns the loaded models, and adds the errors of the others to `broken`. If `broken` is None, it raises the first error.

    Several models load in parallel, each on one core as during inference, because the warm-up runs are timed.
    """
    loaded = []
    with ThreadPoolExecutor(min(at_once, MAX_LOADING), thread_name_prefix="load") as pool:
        futures = [pool.submit(load, source) for source in sources]
        try:
            for source, future in zip(sources, futures, strict=True):
                try:
                    loaded.append(future.result())
                except StartError as error:
                    if broken is None:
                        raise
                    path = source if isinstance(source, Path) else source.path
                    name, broken[path.name] = path.name, without_folders(error.message, [path.parent])
                    logger.error("model `%s` is not served: %s", name, error.message)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error or Ctrl-C: cancels the loads that have not started
    return loaded


def check_next_start(settings: Settings, broken: Mapping[str, str]) -> None:
    """Checks that a start with the same settings would accept the bundles that the models folders have now.

    `broken` has the errors of models that cannot be loaded, by name.

    Raises:
        StartError: The start would fail; the message says what to do.
    """
    answered = {}
    for path in files.find_bundles(settings.models):
        if path.name not in broken:
            answered[path.name] = tasks_of(files.read_manifest(path)[0])
        elif not settings.skip_broken:
            raise BundleError(broken[path.name])
    defaults = wanted_defaults(settings.default, settings.models, answered, broken)
    check_defaults(answered, defaults, by_name=settings.allow_implicit_default)
