"""A graph that really hangs, in a service of several workers: the watchdog, the supervisor and the neighbors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import slow

pytestmark = pytest.mark.serial


@pytest.mark.full_grid
def test_a_worker_whose_lanes_hang_is_replaced(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Its request fails with a reason, those of the other worker are answered all the while, and another process has taken its place."""
    with serve(slow.hanging_bundle(tmp_path / "models").parent, "--workers", "2", "--lanes", "2") as served, ThreadPoolExecutor(1) as pool:

        def ask(text: str) -> httpx.Response:
            return httpx.post(f"{served.url}/classify", json={"inputs": text}, timeout=60, trust_env=False)

        def workers() -> set[int]:
            return {httpx.get(f"{served.url}/info", timeout=60, trust_env=False).json()["worker"]["pid"] for _ in range(8)}

        before = workers()
        hung = pool.submit(ask, "dull")
        statuses = []
        while not hung.done():  # ten seconds of the watchdog, and what the worker takes to end
            statuses.append(ask("good").status_code)
            time.sleep(0.05)
        assert {200, 503} >= set(statuses)
        assert statuses.count(503) <= 3, statuses  # what waited in the same worker, or came while it ended
        assert statuses.count(200) > 3, statuses
        assert 503 == hung.result().status_code
        assert "unavailable" == hung.result().json()["error_type"]
        deadline = time.monotonic() + 20
        while len(workers() - before) == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert 1 == len(workers() - before)
        assert "hung_runs_total 1.0" in httpx.get(f"{served.url}/metrics", trust_env=False).text
    assert "hangs: a run has taken 10 s" in served.log.read_text()
    assert "dull" not in served.log.read_text()
