"""Fairness between one client with heavy requests and clients with short requests: waiting times, and the request limit per key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import slow
from bertserve.bench.workloads import workload_inputs
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
