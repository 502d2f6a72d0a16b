"""Replicas behind a real HAProxy or nginx, and a load in a thread that records the responses of its clients."""

import csv
import io
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

from bertserve.bench.generator import Load, send_loads
from bertserve.bench.target import Body, Target, parse_url
from support import wait_until
from support.replica import PROXIES, HAProxy, Proxy, ServeProcess, is_ready, replicas

LIMIT_S = 60


class Balanced(NamedTuple):
    proxy: Proxy
    replicas: list[ServeProcess]

    def states(self) -> list[str]:
        """Returns the state of each replica in HAProxy: `UP`, `DOWN`, or a transition between them."""
        page = httpx.get(f"{self.proxy.stats_url}/;csv", trust_env=False).text.removeprefix("# ")
        return [row["status"] for row in csv.DictReader(io.StringIO(page)) if row["svname"].startswith("replica")]

    def wait_until_all_serve(self) -> None:
        """Waits until the proxy sends requests to all replicas."""
        wait_until(lambda: all(is_ready(replica.url) for replica in self.replicas))
        if isinstance(self.proxy, HAProxy):
            wait_until(lambda: set(self.states()) == {"UP"})


@contextmanager
def balanced(models: Path, folder: Path, *flags: str, count: int = 2, proxy: str = "haproxy") -> Iterator[Balanced]:
    """Runs replicas with one thread each behind HAProxy or nginx until the block ends."""
    with (
        replicas(models, count, folder, ["--threads", "1", *flags]) as processes,
        PROXIES[proxy]([server.port for server in processes], folder) as front,
    ):
        yield Balanced(front, processes)


@dataclass
class LoadResult:
    """The results of the clients of a load: requests by status or by kind of failure, and their durations in seconds."""

    outcomes: Counter[int | str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)

    @property
    def failed(self) -> dict[int | str, int]:
        """The outcomes other than 200, without the requests that the end of the load interrupted."""
        return {outcome: times for outcome, times in self.outcomes.items() if outcome not in (200, "interrupted")}

    def __str__(self) -> str:
        return f"{self.outcomes[200]} answered, failed {self.failed}, the longest {max(self.waits, default=0):.2f} s"


@contextmanager
def load(url: str, clients: int, text: str = "good", headers: Mapping[str, str] | None = None) -> Iterator[LoadResult]:
    """Runs clients that send requests without a pause; their results are complete when the block ends."""
    stop, result = threading.Event(), LoadResult()
    body = Body(b'{"inputs":"%s"}' % text.encode(), texts=1)
    target = Target(parse_url(f"{url}/classify"), [body], headers or {})
    generator = Load(target, clients, seconds=LIMIT_S, warmup_s=0, timeout_s=LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(send_loads, [generator], stop)
        try:
            time.sleep(0.5)
            yield result
            time.sleep(0.5)
            assert not running.done(), "the load ended before the test"
        finally:
            stop.set()
            running.result(LIMIT_S)
    result.outcomes.update(record.outcome for record in generator.records)
    result.waits += [record.ended - record.sent for record in generator.records]
