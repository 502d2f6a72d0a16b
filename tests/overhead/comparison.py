"""Runs the same loads on each candidate in turn, and computes the ratios within a round. The module has no command line.

A candidate is a way to serve a model: a name and a function that runs it. All candidates have the same number of threads. A new candidate
is one line in `CANDIDATES`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bertserve.bench import bodies
from bertserve.bench.errors import BenchError
from bertserve.bench.load import generator
from bertserve.bench.load.generator import Durations
from bertserve.bench.load.stream import OK
from bertserve.bench.progress import BenchProgress
from bertserve.bench.report.measurement import generator_stats, measure
from bertserve.bench.target import Target, build_target, parse_url
from overhead.ray_cluster import RayCluster
from overhead.replica import haproxy, replicas


class Running(NamedTuple):
    """A running candidate.

    Attributes:
        urls: Addresses among which the load generator divides its connections.
        pids: Returns the processes that currently do its work, to measure their CPU time.
    """

    urls: tuple[str, ...]
    pids: Callable[[], Sequence[int]]


Serve = Callable[[Path, int, Path], AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to serve a model.

    Attributes:
        name: Its name on the command line and in tables.
        description: A description of the candidate.
        serve: Runs the candidate during a block, given a folder of bundles, the total number of threads and a folder for files.
    """

    name: str
    description: str
    serve: Serve


def _replicas(count: int, *, behind_haproxy: bool) -> Serve:
    """Returns a function that runs replicas, with or without HAProxy in front of them. The replicas divide the threads equally."""

    @contextmanager
    def serve(models: Path, threads: int, folder: Path) -> Iterator[Running]:
        with ExitStack() as stack:
            made = stack.enter_context(replicas(models, count, folder, ["--threads", str(threads // count)]))
            urls, pids = [each.url for each in made], [each.process.pid for each in made]
            if behind_haproxy:
                proxy = stack.enter_context(haproxy([each.port for each in made], folder))
                urls, pids = [proxy.url], [proxy.process.pid, *pids]
            yield Running(tuple(urls), lambda: pids)

    return serve


def _on_ray(count: int) -> Serve:
    """Returns a function that runs replicas on Ray Serve. The replicas divide the threads equally."""

    @contextmanager
    def serve(models: Path, threads: int, _: Path) -> Iterator[Running]:
        cpus = threads // count
        application = {
            "name": "bertserve",
            "route_prefix": "/",
            "import_path": "bertserve.service.ray_serve:app",
            "args": {"models": str(models.resolve())},
            "deployments": [{"name": "bertserve", "num_replicas": count, "ray_actor_options": {"num_cpus": cpus}}],
        }
        cluster = RayCluster(cpus=count * cpus)
        try:
            options = {"host": "127.0.0.1", "port": cluster.http}
            cluster.put({"http_options": options, "logging_config": {"enable_access_log": False}, "applications": [application]})
            cluster.wait()
            yield Running((cluster.url,), cluster.pids)
        finally:
            cluster.close()

    return serve


CANDIDATES = (
    Candidate("process", "one process", _replicas(1, behind_haproxy=False)),
    Candidate("haproxy", "one replica behind HAProxy", _replicas(1, behind_haproxy=True)),
    Candidate("two", "two replicas of half the inference threads, each asked directly", _replicas(2, behind_haproxy=False)),
    Candidate("two-haproxy", "two replicas of half the inference threads behind HAProxy", _replicas(2, behind_haproxy=True)),
    Candidate("ray", "one replica on Ray Serve with HAProxy", _on_ray(1)),
    Candidate("two-ray", "two replicas of half the inference threads on Ray Serve with HAProxy", _on_ray(2)),
)


class Load(NamedTuple):
    """A closed loop.

    Attributes:
        workload: Name of the built-in workload.
        connections: Total number of connections; each has one request in flight.
    """

    workload: str
    connections: int


class Threshold(NamedTuple):
    """A minimum ratio of two candidates' requests per second.

    Attributes:
        candidate: Name of the candidate.
        of: Name of the candidate to compare with.
        connections: The threshold applies to loads with this number of connections.
        least: The minimum ratio.
    """

    candidate: str
    of: str
    connections: int
    least: float


THRESHOLDS = (
    Threshold("haproxy", "process", 16, 0.95),
    Threshold("two-haproxy", "process", 16, 0.95),
    Threshold("two-haproxy", "two", 16, 0.95),
    Threshold("ray", "process", 16, 0.85),
    Threshold("two-ray", "process", 16, 0.85),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a candidate for a load.

    Attributes:
        rps: Requests per second with status 200, summed over its addresses.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency.
        failed: Number of failed requests.
        cpu_ms: CPU time of its processes per answered request. Other work on the machine affects it less than the other metrics.
        generator_share: Share of one core that the load generator used, on the same machine.
    """

    rps: float
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_ms: float
    generator_share: float


@dataclass(slots=True)
class Comparison:
    """Rounds of all candidates in turn.

    Attributes:
        candidates: The candidates. Each runs only during its turn in a round, so that no other candidate uses CPU time.
        loads: The loads of each candidate in its turn.
        durations: The durations of each load.
        models: Folder of bundles, including one for `/classify`.
        threads: Total number of inference threads of each candidate.
        progress: Shows the progress.
        results: (name of the candidate, load) -> its results, one per round.
    """

    candidates: Sequence[Candidate]
    loads: Sequence[Load]
    durations: Durations
    models: Path
    threads: int
    progress: BenchProgress
    results: dict[tuple[str, Load], list[Result]] = field(default_factory=dict)

    def run_round(self) -> None:
        """Starts each candidate, runs each load on it, and stops it.

        Raises:
            BenchError: A candidate does not start, cannot be reached, or does not answer.
        """
        for candidate in self.candidates:
            with tempfile.TemporaryDirectory() as folder, candidate.serve(self.models, self.threads, Path(folder)) as running:
                for load in self.loads:
                    # a load is skipped if its connections cannot be divided equally among the addresses
                    if load.connections % len(running.urls) == 0:
                        self.results.setdefault((candidate.name, load), []).append(self._measure(candidate.name, running, load))

    def median(self, candidate: str, load: Load, metric: str) -> float | None:
        """Returns the median of a metric over the rounds, or None if the load was skipped."""
        values = [getattr(result, metric) for result in self.results.get((candidate, load), ())]
        return statistics.median(values) if values else None

    def ratio(self, candidate: str, other: str, load: Load) -> float | None:
        """Returns the median of the ratios of requests per second within rounds, or None if the load was skipped."""
        pairs = zip(self.results.get((candidate, load), ()), self.results.get((other, load), ()), strict=False)
        ratios = [mine.rps / its.rps for mine, its in pairs]
        return statistics.median(ratios) if ratios else None

    def _measure(self, name: str, running: Running, load: Load) -> Result:
        self.progress.start(f"{name}: {load.workload} texts, {load.connections} connections")
        targets = [_target(f"{url}/classify", load.workload) for url in running.urls]
        connections = load.connections // len(targets)
        before = _cpu_s(running.pids())
        done = generator.run_closed_loop(targets, connections, self.durations, stop=threading.Event(), progress=self.progress)
        used = sum(seconds - before.get(pid, 0.0) for pid, seconds in _cpu_s(running.pids()).items())
        records = [record for each in done.records for record in each]
        measured = measure(name, records, done.measured, texts=[body.texts for body in targets[0].bodies])
        if measured.latency is None:
            raise BenchError(f"{name} did not answer any request with {load.workload} texts over {load.connections} connections.")
        return Result(
            rps=measured.rps,
            p50_ms=measured.latency.p50_ms,
            p99_ms=measured.latency.p99_ms,
            failed=round(measured.error_rate * measured.requests),
            cpu_ms=1000 * used / sum(record.outcome == OK for record in records),
            generator_share=generator_stats(done, open_loop=False).cpu_share,
        )


def _cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Returns the CPU seconds of each process with all its threads. Linux counts them in ticks of usually 10 ms."""
    fields = {pid: Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids}
    return {pid: (int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for pid, each in fields.items()}


def _target(url: str, workload: str) -> Target:
    address = parse_url(url)
    return build_target(address, workload, bodies.build_bodies(workload, path=address.path, texts=1, seed=0), {})
