"""Fairness between one client with heavy requests and clients with short requests: waiting times."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bertserve.bench.workloads import workload_inputs
from support.loads import assert_each_ended_once, load, measured_records, metrics, models_for, seconds, show, target
from support.replica import running

pytestmark = pytest.mark.serial

SHORT = workload_inputs("short", seed=1)
# (description, path, body) of the heavy requests
HEAVY = [
    ("lists of 500 texts", "/classify", {"inputs": [SHORT[i % len(SHORT)] for i in range(500)]}),
    ("documents of 80 windows", "/answer", {"inputs": {"question": "How long is it?", "context": "The river is long and wide. " * 2800}}),
]


@pytest.mark.full_grid
@pytest.mark.parametrize(("name", "path", "body"), HEAVY, ids=[name for name, _, _ in HEAVY])
def test_short_requests_do_not_wait_for_a_heavy_client(tmp_path: Path, name: str, path: str, body: dict[str, Any]) -> None:
    """All requests are answered. In one queue for all in order of arrival, others would wait for half of a heavy request or longer."""
    with running(models_for(tmp_path), tmp_path / "log") as server:
        others, client = target(server, "/classify", [{"inputs": text} for text in SHORT]), target(server, path, [body])
        before = metrics(server)
        # the heavy client stops with its first answer after the others' load, so that it is active all the time
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(load, client, 1, seconds(15))
            short = load(others, 2, seconds(15))
        heavy = future.result()
        assert set(assert_each_ended_once(before, metrics(server), short, heavy)) == {200}
    short_s, heavy_s = (median(record.ended - record.intended for record in measured_records(result)) for result in (short, heavy))
    show(f"p50 of short requests, and of {name}", f"{short_s * 1000:.1f} and {heavy_s * 1000:.1f} ms")
    assert short_s < heavy_s / 4
