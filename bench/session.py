"""What all commands share: targets that were tried once, the engine to compare with, and single loads and loops as results."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import inspection
from bench.engine_limit import VERSION, BareEngine, Limit, Work
from bench.errors import BenchError
from bench.load import arrivals, client, target
from bench.load.client import Load, Plan
from bench.load.target import Target
from bench.progress import Progress
from bench.report import measurement
from bench.report.report import Run
from bench.workload import bodies, mixes
from bench.workload.bodies import Body
from service.bundle import files


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of the limit, with the bodies of the load made ready for it."""

    bare: BareEngine
    work: Work
    threads: int
    stop: threading.Event
    progress: Progress

    def limit(self, seconds: float) -> Limit:
        """Runs the bare loop."""
        self.progress.begin(f"engine alone on {self.threads} threads, {seconds:g} s")
        return self.bare.measure(self.work, threads=self.threads, seconds=seconds, stop=self.stop)

    def facts(self) -> dict[str, Any]:
        """Returns what a report says of it."""
        loaded = self.bare.bundle
        spec = loaded.graph("cpu")
        own = self.bare.graph == loaded.path / spec.file
        return {
            "bundle": loaded.manifest.name,
            "digest": loaded.version,
            "graph": self.bare.graph.name,
            "graph_sha256": spec.identity if own else files.digest(self.bare.graph),
            "onnxruntime": VERSION,
            "precision": spec.precision if own else None,
            "threads": self.threads,
        }


def make_engine(
    path: Path, graph: Path | None, given: Sequence[Body], *, threads: int, stop: threading.Event, progress: Progress
) -> Engine:
    """Loads a bundle for the limit.

    Args:
        path: The bundle's folder.
        graph: Another graph to run, or None.
        given: Bodies to run.
        threads: Of the bare loop.
        stop: Set by Ctrl-C.
        progress: Told of the loops.

    Raises:
        BenchError: The bundle or the graph cannot be used, or does not take these bodies.
    """
    bare = BareEngine(path, graph)
    return Engine(bare, bare.work(given), threads, stop, progress)


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
        load = client.closed(targets, connections, self.plan, stop=self.stop, progress=self.progress)
        return self._result(name, chosen, load, before, open_loop=False)

    def open_loop(self, rate: float, *, name: str = "") -> tuple[Run, Load, list[float]]:
        """Loads with Poisson arrivals, the rate shared evenly by the targets; returns the first target's arrivals too."""
        name = name or f"open, {rate:.4g}/s"
        self.progress.begin(name)
        before = self._metrics()
        seconds = self.plan.warmup_s + self.plan.seconds
        times = [arrivals.poisson(rate / len(self.targets), seconds, seed=self.seed + i) for i in range(len(self.targets))]
        load = client.open_loop(self.targets, times, self.most_connections, self.plan, stop=self.stop, progress=self.progress)
        return self._result(name, list(range(len(self.targets))), load, before, open_loop=True), load, times[0]

    def _metrics(self) -> inspection.Metrics:
        return inspection.metrics(self.targets[0].address, self.headers)

    def _result(self, name: str, chosen: Sequence[int], load: Load, before: inspection.Metrics, *, open_loop: bool) -> Run:
        after = self._metrics()
        names = [(self.models[i] or {}).get("name") for i in chosen]
        shared = Counter(names)
        results = []
        for i, model, records in zip(chosen, names, load.records, strict=True):
            # of two targets with one model nobody can say whose runs were whose
            batches = inspection.batches(before, after, model) if model and shared[model] == 1 else None
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
        run = Run(name, results, measurement.generator(load, open_loop=open_loop))
        for warning in run.generator.warnings:
            self.progress.say(f"warning: {warning}")
        return run


def read_target(text: str, headers: Mapping[str, str], *, texts: int, seed: int) -> tuple[Target, Mapping[str, Any] | None]:
    """Returns a target that has answered once, and what its endpoint says of its model.

    Args:
        text: `URL` or `URL=MIX`; without a mix the one for the task of the endpoint's model.
        headers: Sent with every request.
        texts: Inputs of a request.
        seed: Of a built-in mix.

    Raises:
        BenchError: The address, the mix or the file is wrong, or the endpoint refuses the first body.
    """
    url, equals, mix = text.rpartition("=")
    if not equals or ("?" in url and mix not in mixes.NAMES and not Path(mix).exists()):
        url, mix = text, ""
    address = target.parse(url)
    model = inspection.model_info(address, headers)
    mix = mix or mixes.DEFAULTS.get((model or {}).get("task", ""), "short")
    made = target.make(address, mix, bodies.bodies(mix, path=address.path, texts=texts, seed=seed), headers)
    inspection.probe(made, headers)
    # a model's own `endpoint` is that of its task, which may not be the one under load
    shown = {k: v for k, v in (model or {}).items() if k not in ("endpoint", "evidence", "figures")}
    return made, {"endpoint": address.path, **shown} if model else None


def check_single(targets: Sequence[object], command: str) -> None:
    """Raises an error where a command takes one target and was given several.

    Raises:
        BenchError: There is more than one.
    """
    if len(targets) != 1:
        raise BenchError(f"{command} takes one --target, not {len(targets)}.")
