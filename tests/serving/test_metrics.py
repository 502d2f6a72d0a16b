"""The metrics have the right values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import blocked, faked, keys, play
from bertserve.service.api.auth import Authenticator
from bertserve.service.metrics import ProcessMetrics
from bertserve.service.models import utilization
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from conftest import metric
from fakes import FakeEngine
from served_socket import until


def page_after(models: Path, *requests: tuple[str, Any]) -> str:
    """Returns the metrics after POST requests of (path, body) to a service with a broken model."""

    async def check(client: httpx.AsyncClient) -> httpx.Response:
        for path, body in requests:
            await client.post(path, json=body, headers={"authorization": "Bearer swordfish"})
        return await client.get("/metrics")

    (tiny.bundle(models, "broken") / "tokenizer.json").write_text("{}")
    page = play(build(Settings(models=models, skip_broken=True)), check, auth=Authenticator(keys(models.parent, "swordfish")))
    assert page.headers["content-type"].startswith("text/plain")
    return page.text


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [("/models/nope", {"inputs": "good"}, "unknown"), ("/classify", {"inputs": "good", "model": "nope"}, "text-classification")],
)
def test_a_model_that_is_not_loaded_is_labeled_unknown(models: Path, path: str, body: Any, task: str) -> None:
    """An arbitrary name from a client never becomes a label value."""
    page = page_after(models, (path, body))
    assert metric(page, "requests_total", task=task, model="unknown", status="404") == 1
    assert "nope" not in page


def test_all_http_requests_are_counted_by_status(tmp_path: Path) -> None:
    """Requests without a key, with an unknown path, a wrong method or a large body count too. Each status has one series."""
    tiny.bundle(tmp_path / "models")
    key = {"authorization": "Bearer swordfish"}

    async def ask(client: httpx.AsyncClient) -> str:
        await client.post("/classify", json={"inputs": "good"}, headers=key)
        await client.post("/classify", json={"inputs": "good"})
        await client.post("/classify", content=b" " * 5000, headers=key)
        for path in ("/nowhere", "/elsewhere", "/.git"):
            await client.get(path)
        await client.get("/classify", headers=key)
        return (await client.get("/metrics")).text

    settings = Settings(models=tmp_path / "models", max_body_bytes=4096, max_chars=4096)
    page = play(build(settings), ask, auth=Authenticator(keys(tmp_path, "swordfish")))
    counted = dict(re.findall(r'^bertserve_http_requests_total\{status="(\d+)"\} (\S+)$', page, re.MULTILINE))
    assert {"200": "1.0", "401": "1.0", "404": "3.0", "405": "1.0", "413": "1.0"} == counted


def test_loads_are_counted_by_outcome(models: Path) -> None:
    """At the start, each bundle is verified and loaded once. A broken bundle fails at the step that finds the error."""
    page = page_after(models)
    assert metric(page, "model_load_seconds_count", model="tiny", step="verify", outcome="ok") == 1
    assert metric(page, "model_load_seconds_count", model="tiny", step="load", outcome="ok") == 1
    assert metric(page, "model_load_seconds_count", model="broken", outcome="failed") == 1
    assert metric(page, "model_load_seconds_count", model="broken", outcome="ok") == 0


def test_a_reload_is_counted_as_another_load(models: Path) -> None:
    """A reload adds one observation per step; a failed reload adds one with the outcome `failed`."""
    admin = keys(models.parent, "swordfish")

    async def check(client: httpx.AsyncClient) -> str:
        for _ in range(2):
            await client.post("/models/tiny/reload", headers={"authorization": "Bearer swordfish"})
            (models / "tiny" / "tokenizer.json").write_text("{}")
        return (await client.get("/metrics")).text

    page = play(build(Settings(models=models)), check, auth=Authenticator(admin_keys=admin))
    assert metric(page, "model_load_seconds_count", model="tiny", step="load", outcome="ok") == 2
    assert metric(page, "model_load_seconds_count", model="tiny", step="verify", outcome="failed") == 1


def test_the_busy_seconds_of_threads_match_the_scheduler(models: Path) -> None:
    """A running batch counts up to the time of the scrape, and no part of it counts twice."""
    engine = FakeEngine()
    service = faked(models, engine)

    async def check(client: httpx.AsyncClient) -> list[float]:
        return [metric((await client.get("/metrics")).text, "thread_busy_seconds_total") for _ in range(2)]

    first, second = blocked(service, engine, check)
    assert 0 < first < second <= service.scheduler.busy_s


async def test_the_event_loop_is_measured_from_its_start(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "INTERVAL_S", 0.01)
    service = build(Settings(models=models))
    service.utilization.start()
    sum(range(2_000_000))
    service.utilization.measure()
    assert metric(service.metrics.page().decode(), "event_loop_cpu_seconds_total") > 0
    await until(lambda: metric(service.metrics.page().decode(), "event_loop_lag_seconds_count") > 0)
    service.utilization.stop()


@pytest.mark.parametrize("gone", [False, True])
def test_process_metrics_have_one_series_per_worker(gone: bool) -> None:
    """The series cover all workers, whichever worker is scraped; an empty worker slot has no series."""
    processes = ProcessMetrics([os.getpid(), 0 if gone else os.getppid()], (2, 1))
    samples = [sample for family in processes.collect() for sample in family.samples]
    assert {sample.labels["worker"] for sample in samples if sample.name == "process_cpu_seconds_total"} == ({"0"} if gone else {"0", "1"})
    assert {sample.labels["reason"]: sample.value for sample in samples if "replaced" in sample.name} == {"ended": 2, "hung": 1}
