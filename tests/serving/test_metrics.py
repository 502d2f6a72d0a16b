"""The metrics have the right values."""

import re
from pathlib import Path

from bertserve.service.auth import Authenticator
from support import metric, tiny, until
from support.app_client import busy_client, fake_service, keys, serving, state_of
from support.fakes import FakeEngine


async def test_all_http_requests_are_counted_by_status(tmp_path: Path) -> None:
    """Requests without a key, with an unknown path, a wrong method or a large body count too. Each status has one series."""
    tiny.bundle(tmp_path / "models")
    key = {"authorization": "Bearer swordfish"}

    state = state_of(tmp_path / "models", max_body_bytes=4096, max_chars=4096)
    async with serving(state, auth=Authenticator(keys(tmp_path, "swordfish"))) as client:
        await client.post("/classify", json={"inputs": "good"}, headers=key)
        await client.post("/classify", json={"inputs": "good"})
        await client.post("/classify", content=b" " * 5000, headers=key)
        for path in ("/nowhere", "/elsewhere", "/.git"):
            await client.get(path)
        await client.get("/classify", headers=key)
        page = (await client.get("/metrics")).text
    counts = dict(re.findall(r'^bertserve_http_requests_total\{status="(\d+)"\} (\S+)$', page, re.MULTILINE))
    assert counts == {"200": "1.0", "401": "1.0", "404": "3.0", "405": "1.0", "413": "1.0"}


async def test_each_step_of_a_load_is_counted(models: Path) -> None:
    """Each bundle is verified and loaded at the start and at a reload, and a broken bundle is only verified."""
    admin = Authenticator(admin_key_file=keys(models.parent, "swordfish"))
    async with serving(state_of(models), auth=admin) as client:
        for _ in range(2):
            await client.post("/models/tiny/load", headers={"authorization": "Bearer swordfish"})
            (models / "tiny" / "tokenizer.json").write_text("{}")
        page = (await client.get("/metrics")).text
    steps = [("verify", "ok"), ("load", "ok"), ("verify", "failed")]
    assert [metric(page, "model_load_seconds_count", model="tiny", step=step, outcome=outcome) for step, outcome in steps] == [2, 2, 1]


async def test_the_busy_seconds_of_threads_match_the_scheduler(models: Path) -> None:
    """A running batch counts up to the time of the scrape, and no part of it counts twice."""
    engine = FakeEngine()
    service = fake_service(models, engine)
    async with busy_client(service, engine) as client:
        first, second = [metric((await client.get("/metrics")).text, "thread_busy_seconds_total") for _ in range(2)]
    assert 0 < first < second <= service.scheduler.total_run_s


async def test_the_event_loop_is_measured_from_its_start(models: Path) -> None:
    service = state_of(models)
    service.start()
    sum(range(2_000_000))
    service.monitor.measure()
    assert metric(service.metrics.render().decode(), "event_loop_cpu_seconds_total") > 0
    await until(lambda: metric(service.metrics.render().decode(), "event_loop_lag_seconds_count") > 0)
    await service.stop(0)
