"""What all commands share: targets that were tried once, the engine to compare with, and single loads as results."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.engine.benchmark import Engine
from bench.errors import BenchError
from bench.load import arrivals, generator
from bench.load.generator import Load, Plan
from bench.progress import Progress
from bench.report import generator_cost, measurement
from bench.report.report import Run
from bench.target import metrics
from bench.target.target import Target


@dataclass(slots=True)
class Session:
    """Targets under load.

    Attributes:
        targets: What is loaded.
        headers: Sent with every request.
        models: Of each target, what its endpoint says of its model.
        plan: How long a load is.
        stop: Set by Ctrl-C.
        progress: Told of the loads.
        engine: For limits, and to count tokens; only with a single target.
        most_connections: Of an open loop.
        seed: Of arrivals.
    """

    targets: Sequence[Target]
    headers: Mapping[str, str]
    models: Sequence[Mapping[str, Any] | None]
    plan: Plan
    stop: threading.Event
    progress: Progress
    engine: Engine | None = None
    most_connections: int = 512
    seed: int = 0

    def closed(self, connections: int, *, only: int | None = None, name: str = "") -> Run:
        """Loads with a fixed number of connections to each target, or to the one target `only`."""
        chosen = list(range(len(self.targets))) if only is None else [only]
        name = name or f"closed, {connections} connections"
        self.progress.begin(name)
        before = self._metrics()
        targets = [self.targets[i] for i in chosen]
        load = generator.closed(targets, connections, self.plan, stop=self.stop, progress=self.progress)
        return self._result(name, chosen, load, before, open_loop=False)

    def open_loop(self, rate: float, *, name: str = "") -> tuple[Run, Load, list[float]]:
        """Loads with Poisson arrivals, the rate shared evenly by the targets; returns the first target's arrivals too."""
        name = name or f"open, {rate:.4g}/s"
        self.progress.begin(name)
        before = self._metrics()
        seconds = self.plan.warmup_s + self.plan.seconds
        times = [arrivals.poisson(rate / len(self.targets), seconds, seed=self.seed + i) for i in range(len(self.targets))]
        load = generator.open_loop(self.targets, times, self.most_connections, self.plan, stop=self.stop, progress=self.progress)
        return self._result(name, list(range(len(self.targets))), load, before, open_loop=True), load, times[0]

    def require_engine(self) -> Engine:
        """Returns the engine; the command line asks for a bundle."""
        assert self.engine is not None, "the command line asks for a bundle"
        return self.engine

    def _metrics(self) -> metrics.Metrics:
        return metrics.metrics(self.targets[0].address, self.headers)

    def _result(self, name: str, chosen: Sequence[int], load: Load, before: metrics.Metrics, *, open_loop: bool) -> Run:
        after = self._metrics()
        names = [(self.models[i] or {}).get("name") for i in chosen]
        shared = Counter(names)
        results = []
        for i, model, records in zip(chosen, names, load.records, strict=True):
            # of two targets with one model nobody can say whose runs were whose
            batches = metrics.batches(before, after, model) if model and shared[model] == 1 else None
            results.append(
                measurement.measure(
                    self.targets[i].label,
                    records,
                    load.measured,
                    texts=[body.texts for body in self.targets[i].bodies],
                    tokens=self.engine.work.tokens if self.engine else None,
                    batches=batches,
                )
            )
        run = Run(name, results, generator_cost.generator(load, open_loop=open_loop))
        for warning in run.generator.warnings:
            self.progress.say(f"warning: {warning}")
        return run


def check_single(targets: Sequence[object], command: str) -> None:
    """Raises an error where a command takes one target and was given several.

    Raises:
        BenchError: There is more than one.
    """
    if len(targets) != 1:
        raise BenchError(f"{command} takes one --target, not {len(targets)}.")
