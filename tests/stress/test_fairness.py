"""Fairness between one client with heavy requests and clients with short requests: waiting times, and the request limit per key."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

import slow
from bertserve.bench.workloads import workload_inputs
from conftest import ROOT
from loads import (
    assert_each_ended_once,
    beside,
    closed_loop,
    measured,
    models_for,
    samples,
    seconds,
    show,
    target,
)

pytestmark = pytest.mark.serial

PROBES, OK = b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n" * 500, b"HTTP/1.1 200 "
SHORT = workload_inputs("short", seed=1)
# (description, path, body) of the heavy requests
HEAVY = [
    ("lists of 500 texts", "/classify", {"inputs": [SHORT[i % len(SHORT)] for i in range(500)]}),
    ("documents of 80 windows", "/answer", {"inputs": {"question": "How long is it?", "context": "The river is long and wide. " * 2800}}),
]


@pytest.mark.full_grid
@pytest.mark.parametrize(("name", "path", "body"), HEAVY, ids=[name for name, _, _ in HEAVY])
def test_short_requests_do_not_wait_for_a_heavy_client(
    tmp_path: Path, serve: Callable[..., Any], name: str, path: str, body: dict[str, Any]
) -> None:
    """All requests are answered. In one queue for all in order of arrival, others would wait for half of a heavy request or longer."""
    with serve(models_for(tmp_path)) as served:
        others, client = target(served, "/classify", [{"inputs": text} for text in SHORT]), target(served, path, [body])
        before = samples(served)
        # the heavy client stops with its first answer after the others' load, so that it is active all the time
        with beside(lambda: closed_loop(client, 1, seconds(15))) as future:
            short = closed_loop(others, 2, seconds(15))
        heavy = future.result()
        assert {200} == set(assert_each_ended_once(before, samples(served), short, heavy))
    short_s, heavy_s = (median(record.ended - record.intended for record in measured(load)) for load in (short, heavy))
    show(f"p50 of short requests, and of {name}", f"{short_s * 1000:.1f} and {heavy_s * 1000:.1f} ms")
    assert short_s < heavy_s / 4


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

    def flood(address: tuple[str, int], over: threading.Event) -> None:
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

        def text_s() -> float:
            """Returns the median seconds of a short text."""
            times = []
            for _ in range(15):
                start = time.monotonic()
                assert client.post("/classify", json={"inputs": "A warm, funny film."}).status_code == 200
                times.append(time.monotonic() - start)
            return median(times)

        alone, beside_probes = [], []
        for _ in range(4):  # in turn, because other processes also use the machine
            alone.append(text_s())
            before, over = answered, threading.Event()
            done = pool.submit(flood, served.address, over)
            try:
                while answered < before + 200:
                    over.wait(0.01)
                beside_probes.append(text_s())
            finally:
                over.set()
            done.result()
    assert min(beside_probes) < 4 * min(alone)
