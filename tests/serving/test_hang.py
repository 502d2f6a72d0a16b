"""A graph that really hangs, in a service with several workers: watchdog, replacement and the other worker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import slow
from conftest import metric

pytestmark = pytest.mark.serial


@pytest.mark.full_grid
def test_a_worker_whose_threads_hang_is_replaced(tmp_path: Path, serve: Callable[..., Any]) -> None:
    with (
        serve(slow.hanging_bundle(tmp_path / "models").parent, "--workers", "2", "--threads", "2") as served,
        connections_of_two_workers(served.url, each=2) as ((hanging, waiting), (working, _)),
        ThreadPoolExecutor(2) as pool,
    ):
        before = {worker(hanging), worker(working)}
        hung, waited, answered = pool.submit(ask, hanging, "dull"), None, []
        start = time.monotonic()
        while not hung.done():  # until the watchdog's limit of 2 s
            answered.append(ask(working, "good").status_code)
            if waited is None and thread_busy_s(working) > 1:  # an earlier request could join the batch that hangs
                waited = pool.submit(ask, waiting, "good")
            time.sleep(0.05)
        hung_s = time.monotonic() - start
        while "restarted as process" not in served.log.read_text():
            answered.append(ask(working, "good").status_code)  # while the worker ends and its replacement starts
            assert time.monotonic() < start + 60
        print(f"failed after {hung_s:.1f} s, replaced after {time.monotonic() - start:.1f} s, {len(answered)} others answered meanwhile")
        assert {200} == set(answered)
        assert 500 == hung.result().status_code
        assert "engine" == hung.result().json()["error_type"]
        assert "abandoned" in hung.result().json()["error"]
        assert waited is not None
        assert waited.result().status_code in (200, 503)  # another thread of the worker answers it, unless the worker ends first
        with connections_of_two_workers(served.url) as ((one,), (other,)):
            assert 1 == len({worker(one), worker(other)} - before)
            assert "hung_runs_total 1.0" in one.get("/metrics").text
    assert "has taken 2 s" in served.log.read_text()
    assert "dull" not in served.log.read_text()


@contextmanager
def connections_of_two_workers(url: str, *, each: int = 1) -> Iterator[list[list[httpx.Client]]]:
    """Yields `each` connections to each of two workers, and closes them at the end."""
    found: dict[int, list[httpx.Client]] = defaultdict(list)
    with ExitStack() as stack:
        while len(found) < 2 or min(map(len, found.values())) < each:
            client = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
            found[worker(client)].append(client)
        yield [clients[:each] for clients in found.values()]


def worker(client: httpx.Client) -> int:
    return int(client.get("/info").json()["worker"]["pid"])


def ask(client: httpx.Client, text: str) -> httpx.Response:
    return client.post("/classify", json={"inputs": text})


def thread_busy_s(client: httpx.Client) -> float:
    """Returns the seconds for which inference threads had a batch, over all workers."""
    return metric(client.get("/metrics").text, "thread_busy_seconds_total")
