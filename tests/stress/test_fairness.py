"""Fairness between one client with heavy requests and clients with short requests: waiting times, and the request limit per key."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import slow
from bertserve.bench.generator import LoadResult, poisson_arrivals
from bertserve.bench.workloads import workload_inputs
from conftest import ROOT
from loads import (
    LONG,
    assert_each_ended_once,
    beside,
    closed_loop,
    measured,
    models_for,
    open_loop,
    percentile,
    samples,
    seconds,
    show,
    target,
)

pytestmark = pytest.mark.serial

PROBES, OK = b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n" * 500, b"HTTP/1.1 200 "
SHARE = 0.2  # rate of the other clients, as a share of the service's throughput
TURNS = 3 if LONG else 1
SHORT = workload_inputs("short", seed=1)
# (description, path, body) of the heavy requests
HEAVY = [
    ("lists of 500 texts", "/classify", {"inputs": [SHORT[i % len(SHORT)] for i in range(500)]}),
    ("documents of 80 windows", "/answer", {"inputs": {"question": "How long is it?", "context": "The river is long and wide. " * 2800}}),
]


@pytest.mark.full_grid
def test_all_requests_are_answered_next_to_a_heavy_client(tmp_path: Path, serve: Callable[..., Any]) -> None:
    with serve(models_for(tmp_path)) as served:
        others = target(served, "/classify", [{"inputs": text} for text in SHORT])
        before = samples(served)
        loads = [closed_loop(others, 8, seconds(4) / 4)]
        rate = SHARE * len(loads[0].records) / (loads[0].measured[1] - loads[0].measured[0])

        def others_alone() -> LoadResult:
            loads.append(open_loop(others, poisson_arrivals(rate, seconds(15) / 2, seed=len(loads)), seconds(15) / 2))
            return loads[-1]

        for name, path, body in HEAVY:
            client = target(served, path, [body])
            alone, among = [], []
            for _ in range(TURNS):
                alone.append(others_alone())
                # the heavy client stops with its first answer after the others' load, so that it is active all the time
                with beside(lambda client=client: closed_loop(client, 1, seconds(15) / 2)) as heavy:  # type: ignore[misc]
                    among.append(others_alone())
                loads.append(heavy.result())
            _show_figures(name, rate, alone, among)
        assert {200} == set(assert_each_ended_once(before, samples(served), *loads))


def _show_figures(name: str, rate: float, alone: list[LoadResult], among: list[LoadResult]) -> None:
    waits = [[record.ended - record.intended for load in loads for record in measured(load)] for loads in (alone, among)]
    (usual, most), (raised, raised_most) = ([percentile(times, share) * 1000 for share in (0.5, 0.99)] for times in waits)
    ratio = raised_most / max(most, 0.1)
    show(
        f"{rate:.0f} others a second beside {name}, bar p99 3x",
        f"p99 {most:.1f} ms alone, {raised_most:.1f} ms beside: {ratio:.1f}x; p50 {usual:.1f} and {raised:.1f} ms",
    )


def test_requests_over_the_limit_of_a_key_are_refused(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Each request of the greedy key gets one answer: 200, or 429 over the limit. Meanwhile all requests of another key get 200."""
    slow.bundle(tmp_path / "models")
    (tmp_path / "keys").write_text("greedy\nmodest")
    flags = ("--api-key-file", str(tmp_path / "keys"), "--max-concurrent-per-key", "4")
    with serve(tmp_path / "models", *flags) as served:
        greedy, modest = (target(served, "/classify", [{"inputs": "good"}], Authorization=f"Bearer {key}") for key in ("greedy", "modest"))
        before = samples(served)
        with beside(lambda: closed_loop(greedy, 16, seconds(10))) as many:
            few = closed_loop(modest, 4, seconds(10) / 2)
        ended = assert_each_ended_once(before, samples(served), many.result(), few, metric="key_requests_total")
        assert {200, 429} == set(ended)
        assert {200} == {record.outcome for record in few.records}
        show("429 of a key with 16 connections of which 4 may ask", f"{sum(r.outcome == 429 for r in many.result().records)}")


def test_pipelined_probes_do_not_starve_a_short_text(serve: Callable[..., Any]) -> None:
    """Event loop turns that are shorter than Python's switch interval must not keep the GIL from inference threads."""
    answered = 0
    over = threading.Event()

    def flood(address: tuple[str, int]) -> None:
        nonlocal answered
        with socket.create_connection(address) as probes:
            probes.settimeout(0.01)
            rest, unsent = b"", memoryview(PROBES)
            while not over.is_set():
                with suppress(TimeoutError):
                    unsent = unsent[probes.send(unsent) :] or memoryview(PROBES)
                with suppress(TimeoutError):
                    rest = rest[-len(OK) + 1 :] + probes.recv(1 << 20)
                    answered += rest.count(OK)

    with (
        serve(ROOT / "models") as served,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client,
    ):
        start = time.monotonic()
        done = pool.submit(flood, served.address)
        while answered < 1000:
            over.wait(0.01)
        try:
            for _ in range(10):
                assert client.post("/classify", json={"inputs": "A warm, funny film."}).status_code == 200
            probes_per_s = answered / (time.monotonic() - start)
        finally:
            over.set()
        done.result()

    # a pause of 1 ms after each probe limits the rate to 1,000 on any machine; without the pause it is 5,000 or more
    assert probes_per_s < 2000
