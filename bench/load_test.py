"""A load test: probed targets with the settings of loads, and each load as a run of the report."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertserve.bench.engine import EngineBenchmark
from bertserve.bench.load import generator
from bertserve.bench.load.generator import Durations, LoadResult, poisson_arrivals
from bertserve.bench.progress import BenchProgress
from bertserve.bench.report.measurement import generator_stats, measure
from bertserve.bench.report.report import ReportRun
from bertserve.bench.report.slo import METRICS
from bertserve.bench.target import Metrics, Target, batch_stats, read_metrics
from bertserve.service.errors import plural


@dataclass(slots=True)
class LoadTest:
    """Targets and the settings of their loads.

    Attributes:
        targets: Endpoints to load; each has accepted one request.
        headers: Headers of every request.
        models: For each target, its endpoint's information about the model.
        durations: The durations of each load.
        stop: Set by Ctrl-C.
        progress: Gets the counts of each load.
        engine: Measures the engine throughput, and counts the tokens of the bodies; only with a single target.
        max_connections: Maximum number of connections per target in an open loop.
        seed: Seed of the arrival times.
    """

    targets: Sequence[Target]
    headers: Mapping[str, str]
    models: Sequence[Mapping[str, Any] | None]
    durations: Durations
    stop: threading.Event
    progress: BenchProgress
    engine: EngineBenchmark | None
    max_connections: int
    seed: int

    def run_closed_loop(self, connections: int, *, only: int | None = None, name: str = "") -> ReportRun:
        """Runs a closed loop with this many connections per target, to all targets, or only to the one with index `only`."""
        indices = list(range(len(self.targets))) if only is None else [only]
        name = name or f"closed, {plural(connections, 'connection')}"
        self.progress.start(name)
        before = self._read_metrics()
        targets = [self.targets[i] for i in indices]
        load = generator.run_closed_loop(targets, connections, self.durations, stop=self.stop, progress=self.progress)
        return self._build_run(name, indices, load, before, open_loop=False)

    def run_open_loop(self, rate: float, *, name: str = "") -> tuple[ReportRun, LoadResult, list[float]]:
        """Runs an open loop with Poisson arrivals; the rate is in requests per second, divided evenly among the targets.

        Returns:
            The run, the recorded load, and the arrival times of the first target in seconds from the start of the load.
        """
        name = name or f"open, {rate:.4g}/s"
        self.progress.start(name)
        before = self._read_metrics()
        seconds = self.durations.warmup_s + self.durations.seconds
        count = len(self.targets)
        arrivals = [poisson_arrivals(rate / count, seconds, seed=self.seed + i) for i in range(count)]
        load = generator.run_open_loop(self.targets, arrivals, self.max_connections, self.durations, stop=self.stop, progress=self.progress)
        return self._build_run(name, list(range(count)), load, before, open_loop=True), load, arrivals[0]

    def _read_metrics(self) -> Metrics:
        return read_metrics(self.targets[0].address, self.headers)

    def _build_run(self, name: str, indices: Sequence[int], load: LoadResult, before: Metrics, *, open_loop: bool) -> ReportRun:
        after = self._read_metrics()
        models = [(self.models[i] or {}).get("name") for i in indices]
        targets_of_model = Counter(models)
        measurements = []
        for i, model, records in zip(indices, models, load.records, strict=True):
            # the metrics of a model do not distinguish its targets
            batches = batch_stats(before, after, model) if model and targets_of_model[model] == 1 else None
            measurements.append(
                measure(
                    self.targets[i].label,
                    records,
                    load.measured,
                    texts=[body.texts for body in self.targets[i].bodies],
                    tokens=self.engine.encoded.tokens if self.engine else None,
                    batches=batches,
                )
            )
        run = ReportRun(name, measurements, generator_stats(load, open_loop=open_loop))
        for warning in run.generator.warnings:
            self.progress.log(f"warning: {warning}")
        return run


RATES = ("rps", "texts_per_s", "tokens_per_s")


def run_metrics(run: ReportRun) -> dict[str, float | None]:
    """Returns a run's metrics: the sum of rates over its targets, and the worst value of every other metric."""
    metrics = [target.figures() for target in run.targets]
    return {name: _combine(name, [values[name] for values in metrics]) for name in metrics[0]}


def median_metrics(runs: Sequence[ReportRun]) -> dict[str, float | None]:
    """Returns the median of each metric over several runs."""
    metrics = [run_metrics(run) for run in runs]
    return {name: median([values[name] for values in metrics]) for name in (metrics[0] if metrics else {})}


def median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that are not None, or None if there are none."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _combine(name: str, values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    if name in RATES:
        return sum(numbers)
    return max(numbers) if METRICS[name] else min(numbers)
