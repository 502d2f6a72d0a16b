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
    """Its request fails with a reason, others are answered all the while, once it is noticed all of them, and another process takes its place."""
    with serve(slow.hanging_bundle(tmp_path / "models").parent, "--workers", "2", "--lanes", "2") as served, ThreadPoolExecutor(1) as pool:

        def ask(text: str) -> httpx.Response:
            return httpx.post(f"{served.url}/classify", json={"inputs": text}, timeout=60, trust_env=False)

        def workers() -> set[int]:
            found: set[int] = set()
            while len(found) < 2:  # a busy machine may give one of them several connections in turn
                found.add(httpx.get(f"{served.url}/info", timeout=60, trust_env=False).json()["worker"]["pid"])
            return found

        before = workers()
        hung = pool.submit(ask, "dull")
        before_notice, after_notice = [], []
        start = time.monotonic()
        while not hung.done():  # three seconds of the watchdog
            before_notice.append(ask("good").status_code)
            time.sleep(0.05)
        answered_s = time.monotonic() - start
        while "worker 0 is process" not in (log := served.log.read_text()) and "worker 1 is process" not in log:
            after_notice.append(ask("good").status_code)  # while it ends, and the next one starts
            assert time.monotonic() < start + 60
        print(f"failed after {answered_s:.1f} s, replaced after {time.monotonic() - start:.1f} s, others: {before_notice} {after_notice}")
        assert before_notice.count(200) > 0
        assert before_notice.count(503) == len(before_notice) - before_notice.count(200) <= 2  # what waited in the same worker
        assert {200} == set(after_notice)
        assert 500 == hung.result().status_code
        assert "engine" == hung.result().json()["error_type"]
        assert "its lane is given up" in hung.result().json()["error"]
        assert 1 == len(workers() - before)
        assert "hung_runs_total 1.0" in httpx.get(f"{served.url}/metrics", trust_env=False).text
    assert "hangs: a run has taken 2 s" in served.log.read_text()
    assert "dull" not in served.log.read_text()
