"""Contenders: ways to serve one model with the same number of lanes, each a name and a function that runs it.

Another way is one more function here and a line in `CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bertserve.bench.overhead.haproxy import haproxy
from bertserve.bench.overhead.ray_cluster import RayCluster
from bertserve.bench.overhead.replica import replicas


class Running(NamedTuple):
    """A contender that runs.

    Attributes:
        urls: Addresses among which the load generator divides its connections.
        pids: Returns the processes that do its work now, whose CPU time is counted.
    """

    urls: tuple[str, ...]
    pids: Callable[[], Sequence[int]]


Serve = Callable[[Path, int, Path], AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to serve a model.

    Attributes:
        name: Its name on the command line and in tables.
        description: The same in words.
        serve: From a folder of bundles, the number of lanes in all, and a folder for files, runs it while a block runs.
    """

    name: str
    description: str
    serve: Serve


def _of(pids: Sequence[int]) -> Callable[[], Sequence[int]]:
    return lambda: pids


@contextmanager
def _process(models: Path, lanes: int, folder: Path) -> Iterator[Running]:
    with replicas(models, 1, folder, ["--lanes", str(lanes)]) as made:
        yield Running(tuple(each.url for each in made), _of(tuple(each.process.pid for each in made)))


@contextmanager
def _one_behind_haproxy(models: Path, lanes: int, folder: Path) -> Iterator[Running]:
    with replicas(models, 1, folder, ["--lanes", str(lanes)]) as made, haproxy([each.port for each in made], folder) as proxy:
        yield Running((proxy.url,), _of((proxy.process.pid, *(each.process.pid for each in made))))


@contextmanager
def _two_processes(models: Path, lanes: int, folder: Path) -> Iterator[Running]:
    with replicas(models, 2, folder, ["--lanes", str(lanes // 2)]) as made:
        yield Running(tuple(each.url for each in made), _of(tuple(each.process.pid for each in made)))


@contextmanager
def _two_behind_haproxy(models: Path, lanes: int, folder: Path) -> Iterator[Running]:
    with replicas(models, 2, folder, ["--lanes", str(lanes // 2)]) as made, haproxy([each.port for each in made], folder) as proxy:
        yield Running((proxy.url,), _of((proxy.process.pid, *(each.process.pid for each in made))))


@contextmanager
def _ray(models: Path, replica_count: int, cpus: int) -> Iterator[Running]:
    """Runs replicas of so many lanes each on Ray Serve."""
    application = {
        "name": "bertserve",
        "route_prefix": "/",
        "import_path": "bertserve.service.ray:app",
        "args": {"models": str(models.resolve())},
        "deployments": [{"name": "bertserve", "num_replicas": replica_count, "ray_actor_options": {"num_cpus": cpus}}],
    }
    cluster = RayCluster(cpus=replica_count * cpus)
    try:
        options = {"host": "127.0.0.1", "port": cluster.http}
        cluster.put({"http_options": options, "logging_config": {"enable_access_log": False}, "applications": [application]})
        cluster.wait()
        yield Running((cluster.url,), cluster.pids)
    finally:
        cluster.close()


@contextmanager
def _one_on_ray(models: Path, lanes: int, _: Path) -> Iterator[Running]:
    with _ray(models, 1, lanes) as running:
        yield running


@contextmanager
def _two_on_ray(models: Path, lanes: int, _: Path) -> Iterator[Running]:
    with _ray(models, 2, lanes // 2) as running:
        yield running


CONTENDERS = (
    Contender("process", "one process", _process),
    Contender("haproxy", "one replica behind HAProxy", _one_behind_haproxy),
    Contender("two", "two replicas of half the lanes, each asked directly", _two_processes),
    Contender("two-haproxy", "two replicas of half the lanes behind HAProxy", _two_behind_haproxy),
    Contender("ray", "one replica on Ray Serve with HAProxy", _one_on_ray),
    Contender("two-ray", "two replicas of half the lanes on Ray Serve with HAProxy", _two_on_ray),
)
