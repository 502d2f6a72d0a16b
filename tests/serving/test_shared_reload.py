"""Model changes with several workers: each worker makes them in the same order, and the caller learns where a change failed."""

from __future__ import annotations

import asyncio
import errno
import pickle
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import play, rejected
from bertserve.service.api_keys import ApiKeys
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BundleError, InvalidValueError, NotFoundError, PartialChangeError, ServerError, UnavailableError
from bertserve.service.http.auth import Authenticator
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.model import Model
from bertserve.service.serving.reloader import SharedReloader
from bertserve.service.serving.workers import Change, ReloadLog, Report, WorkerContext
from bertserve.service.settings import Settings


class Service:
    """Two workers in this process and a supervisor's reload log. Messages pass through the event loop instead of pipes.

    Attributes:
        log: The reload log.
        states: State of each worker.
        is_alone: Whether the workers cannot reach the log.
    """

    def __init__(self, models: Path, **settings: Any) -> None:
        self.log, self.is_alone = ReloadLog(2, self._send), False
        self._settings, self._folder = Settings(models=models, workers=2, threads=2, **settings), models.parent
        self.states = [self._started(index) for index in (0, 1)]

    def replace(self, index: int) -> None:
        """Ends a worker and starts its replacement, which has not reported to the log yet."""
        self.log.on_end(index)
        self.states[index] = self._started(index)

    def _started(self, index: int) -> AppState:
        return build(self._settings, WorkerContext(index, 2, self._folder, tell=self._tell, before=self.log.reports.get(index)))

    def _tell(self, message: Change | Report) -> None:
        if self.is_alone:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        asyncio.get_running_loop().call_soon(self.log.take, pickle.loads(pickle.dumps(message)))

    def _send(self, index: int, message: Change | Report) -> None:
        asyncio.get_running_loop().call_soon(reloader(self.states[index]).receive, message)


def reloader(state: AppState) -> SharedReloader:
    assert isinstance(state.reloader, SharedReloader)
    return state.reloader


def served(state: AppState) -> dict[str, str]:
    return {name: model.bundle.version for name, model in state.registry.models.items()}


def counted(state: AppState) -> float:
    """Returns the metric of models that differ between workers."""
    [family] = state.metrics.differing_models.collect()
    return family.samples[0].value


def following(states: list[AppState], check: Callable[[], Awaitable[None]]) -> None:
    """Lets the workers report to the log, then runs a check."""

    async def run() -> None:
        for state in states:
            reloader(state).report()
        await asyncio.wait_for(check(), 20)

    asyncio.run(run())


def refusing(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(bundle: Bundle) -> Model:
        raise BundleError("there is not enough memory.")

    monkeypatch.setattr(state.reloader, "_load", load)


def test_all_workers_make_a_change_that_one_of_them_gets(models: Path) -> None:
    """When a change returns, all workers serve the same models. This also holds for two simultaneous changes at different workers."""
    tiny.bundle(models, "other")
    states = Service(models, allow_implicit_default=True).states
    before = served(states[0])["tiny"]

    async def check() -> None:
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        model = await reloader(states[0]).load("tiny")
        assert [model.bundle.version] * 2 == [served(state)["tiny"] for state in states]
        assert before != model.bundle.version
        await asyncio.gather(reloader(states[0]).unload("other"), reloader(states[1]).load("tiny"))
        assert [["tiny"]] * 2 == [list(served(state)) for state in states]
        assert {} == reloader(states[1]).differing()
        with pytest.raises(NotFoundError, match="`other`"):
            await reloader(states[1]).unload("other")
        with pytest.raises(NotFoundError, match="`nobody`"):
            await reloader(states[1]).load("nobody")

    following(states, check)


def test_a_bad_bundle_changes_no_worker(models: Path) -> None:
    states = Service(models).states
    before = served(states[0])

    async def check() -> None:
        (models / "tiny/tokenizer.json").write_text("{}")
        with pytest.raises(InvalidValueError, match="`tiny/tokenizer"):
            await reloader(states[0]).load("tiny")
        assert [before] * 2 == [served(state) for state in states]

    following(states, check)


def test_a_worker_that_cannot_make_a_change_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the worker's reason, and `differing` has both versions until the model is unloaded."""
    states = Service(models).states
    before = served(states[0])["tiny"]
    refusing(states[1], monkeypatch)

    async def check() -> None:
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        for state in states:
            with pytest.raises(PartialChangeError, match=r"worker 0, .* worker 1 \(.*not enough memory"):
                await reloader(state).load("tiny")
        after = served(states[0])["tiny"]
        workers = [{"index": 0, "version": after}, {"index": 1, "version": before, "broken": "there is not enough memory."}]
        shown = [state | {"default_of": ["/classify"]} for state in workers]
        assert [{"tiny": shown}] * 2 == [reloader(state).differing() for state in states]
        assert [1, 1] == [counted(state) for state in states]
        tiny.bundle(models, "new")
        with pytest.raises(PartialChangeError):
            await reloader(states[1]).load("new")
        await reloader(states[1]).unload("new")  # only the other worker has it
        await reloader(states[1]).unload("tiny")
        assert [{}, {}] == [served(state) for state in states]
        assert {} == reloader(states[0]).differing()

    following(states, check)


def test_a_replacement_worker_serves_the_models_of_its_predecessor(models: Path) -> None:
    """The replacement skips unloaded models, new models and broken bundles. A missed refresh is made later."""
    tiny.bundle(models, "broken")
    tiny.bundle(models, "gone")
    service = Service(models, default={"classify": "gone"})

    async def change() -> None:
        await reloader(service.states[0]).unload("gone")

    following(service.states, change)
    tiny.bundle(models, "never")
    (models / "broken/tokenizer.json").write_text("{}")
    service.replace(1)
    later = service.states[1]
    assert ["tiny"] == list(served(later))
    assert "was altered" in later.broken["broken"]

    async def followed() -> None:
        service.log.take(Change("refresh"))
        while service.log.reports[1].change != Change("refresh"):
            await asyncio.sleep(0.01)
        assert ["gone", "never", "tiny"] == list(served(later))

    following([later], followed)


def test_a_default_that_differs_is_shown(models: Path) -> None:
    """Workers with the same model versions can still use different models for an endpoint."""
    tiny.bundle(models, "other")
    states = Service(models, default={"classify": "tiny"}).states

    async def check() -> None:
        await asyncio.sleep(0)
        assert {} == reloader(states[0]).differing()
        report = Report(1, served(states[1]), {}, {"text-classification": "other"})
        reloader(states[0]).receive(report)
        shown = {name: [worker["default_of"] for worker in workers] for name, workers in reloader(states[0]).differing().items()}
        assert {"other": [[], ["/classify"]], "tiny": [["/classify"], []]} == shown
        assert 2 == counted(states[0])
        reloader(states[0]).receive(replace(report, defaults={"text-classification": "tiny"}))
        assert 0 == counted(states[0])

    following(states, check)


def test_a_replacement_worker_logs_that_a_bundle_has_changed(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The replacement serves the new version; the other workers serve the old version until a refresh."""
    tiny.bundle(models, "same")
    service = Service(models, allow_implicit_default=True)
    before = served(service.states[0])["tiny"]

    async def started() -> None:
        await asyncio.sleep(0)

    following(service.states, started)
    shutil.rmtree(models / "tiny")
    tiny.bundle(models, "tiny", seed=1)
    caplog.clear()
    service.replace(1)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ("tiny", served(service.states[1])["tiny"], before) == record.args
    assert "SIGHUP" in record.getMessage()


@pytest.mark.parametrize("change", ["gone", "no manifest", "too long", "unreadable"])
def test_a_replacement_worker_serves_the_models_that_it_can_load(models: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that can no longer be loaded is reported as broken."""
    tiny.bundle(models, "other")
    service = Service(models, default={"classify": "tiny"}, max_batch_tokens=32)

    async def started() -> None:
        await asyncio.sleep(0)

    following(service.states, started)
    (models / "lost+found").mkdir()
    if change == "unreadable":

        def refuse(path: Path) -> bytes:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        original = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) if path.parent.name == "other" else original(path))
        monkeypatch.setattr(Path, "is_file", refuse)
    else:
        shutil.rmtree(models / "other")
    if change == "no manifest":
        (models / "other").mkdir()
    elif change == "too long":
        tiny.bundle(models, "other", max_length=64)
    service.replace(1)
    later = service.states[1]
    assert (["tiny"], ["other"]) == (list(served(later)), list(later.broken))


def test_the_replacement_of_a_worker_without_models_has_none(models: Path) -> None:
    service = Service(models)

    async def change() -> None:
        await reloader(service.states[0]).unload("tiny")

    following(service.states, change)
    service.replace(1)
    assert {} == served(service.states[1])


def logged() -> tuple[ReloadLog, list[tuple[int, Change | Report]]]:
    """Returns a reload log with two workers that have reported, and the messages that it sends."""
    sent: list[tuple[int, Change | Report]] = []
    log = ReloadLog(2, lambda index, message: sent.append((index, message)))
    for index in (0, 1):
        log.take(Report(index, {"tiny": "1"}, {}, {}))
    sent.clear()
    return log, sent


def test_a_change_that_ended_a_worker_is_not_repeated() -> None:
    """A repetition would end each replacement worker too. The worker that asked for the change gets a `ServerError`."""
    log, sent = logged()
    first, second = Change("load", "tiny", 0, 0), Change("unload", "tiny", 0, 1)
    log.take(first)
    log.take(second)
    log.on_end(1)
    ended = log.reports[1]
    assert [(0, first), (1, first), (0, ended)] == sent
    assert (first, {"tiny": "1"}, ServerError) == (ended.change, ended.served, type(ended.error))
    started = Report(1, {"tiny": "1"}, {}, {})
    log.take(started)
    assert (1, second) == sent[-1]


def test_a_worker_that_ends_during_a_refresh_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A SIGHUP has no caller that gets an error, so a log line asks for another SIGHUP, unless the service stops."""
    for change, stopping, args in (
        (Change("refresh"), False, [(1,)]),
        (Change("refresh"), True, []),
        (Change("load", "tiny", 0), False, []),
    ):
        log, _ = logged()
        caplog.clear()
        log.on_end(0)
        log.take(change)
        log.on_end(1, stopping=stopping)
        assert args == [record.args for record in caplog.records if "SIGHUP" in record.getMessage()]


def test_changes_for_an_absent_worker_are_made_by_its_replacement() -> None:
    """The change also waits if a replacement ends before its first report."""
    log, sent = logged()
    change = Change("load", "tiny", 0)
    log.on_end(1)
    log.take(change)
    log.on_end(1)
    assert [(0, change)] == sent
    log.take(Report(1, {}, {}, {}))
    assert (1, change) == sent[-1]


def test_all_workers_get_changes_in_the_same_order() -> None:
    """A worker gets the next change when it has made the previous one."""
    log, sent = logged()
    changes = [Change("load", "\u00e4", 0), Change("unload", "b", 1), Change("refresh")]
    for change in changes:
        log.take(change)
    assert [(0, changes[0]), (1, changes[0])] == sent
    for index in (1, 0):
        for change in changes:
            log.take(Report(index, {}, {}, {}, change))
    for index in (0, 1):
        assert changes == [message for to, message in sent if to == index and isinstance(message, Change)]


def test_waiting_refreshes_are_merged() -> None:
    """Each worker starts one refresh after the last request for it. The other changes keep their order."""
    log, sent = logged()
    refresh, first, second = Change("refresh"), Change("load", "a", 0, 0), Change("load", "b", 0, 1)

    def made(index: int) -> None:
        log.take(Report(index, {}, {}, {}, [message for to, message in sent if to == index and isinstance(message, Change)][-1]))

    log.take(first)
    made(0)
    for _ in range(3):
        log.take(refresh)  # worker 0 makes the first refresh, and the second waits; at worker 1 the first waits
    log.take(second)
    for _ in range(3):
        log.take(refresh)
    log.on_end(1)
    log.take(refresh)
    log.take(Report(1, {}, {}, {}))
    for _ in range(4):
        made(0)
    for _ in range(3):
        made(1)
    changes = [[message for to, message in sent if to == index and isinstance(message, Change)] for index in (0, 1)]
    assert [first, refresh, refresh, second, refresh] == changes[0]
    assert [first, refresh, second, refresh] == changes[1]
    assert [0, 0] == [len(waiting) for waiting in log._waiting]


def test_a_starting_worker_refreshes_once() -> None:
    log, sent = logged()
    log.on_end(1)
    for _ in range(3):
        log.take(Change("refresh"))
    log.take(Report(1, {}, {}, {}))
    log.take(Report(1, {}, {}, {}, Change("refresh")))
    assert [Change("refresh")] == [message for to, message in sent if to == 1 and isinstance(message, Change)]


def test_a_difference_between_workers_is_reported(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the change is an error, and the model pages show the difference until it ends."""
    monkeypatch.setattr("bertserve.service.serving.reloader.WAIT_S", 0.0)
    monkeypatch.setattr("bertserve.service.serving.reloader.WAIT_FACTOR", 0.0)
    (tmp_path / "admin").write_text("trident")
    service = Service(models)
    state = service.states[0]
    version = served(state)["tiny"]
    monkeypatch.setattr(reloader(service.states[1]), "receive", lambda message: None)  # this worker hangs

    async def check(client: httpx.AsyncClient) -> None:
        reloader(state).report()
        service.log.take(Report(1, {"tiny": "1" * 64, "elsewhere": "2" * 64}, {}, {}))
        answer = await client.post("/models/tiny/reload", headers={"authorization": "Bearer trident"})
        assert "not on worker 1 (" in rejected(answer, 500, "partial_change")
        answer = await client.post("/models/elsewhere/unload", headers={"authorization": "Bearer trident"})
        assert "worker none" in rejected(answer, 500, "partial_change")
        tiny_workers = [{"index": 0, "version": version, "default_of": ["/classify"]}, {"index": 1, "version": "1" * 64, "default_of": []}]
        [elsewhere, shown] = sorted((await client.get("/models")).json(), key=lambda model: model["name"])
        assert tiny_workers == shown["workers"] == (await client.get("/models/tiny")).json()["workers"]
        [none, other] = elsewhere["workers"]
        assert ("elsewhere", None, "2" * 64) == (elsewhere["name"], none["version"], other["version"])
        defaults = {"text-classification": "tiny"}
        service.log.take(Report(1, {"tiny": version}, {}, defaults, Change("load", "tiny", 0)))
        await asyncio.sleep(0)
        assert "workers" not in (await client.get("/models/tiny")).json()

    play(state, check, auth=Authenticator(None, admin_keys=ApiKeys(tmp_path / "admin")))


def test_no_model_changes_while_the_supervisor_is_unreachable(models: Path) -> None:
    service = Service(models)
    states = service.states

    async def check() -> None:
        service.is_alone = True
        with pytest.raises(UnavailableError, match="Broken pipe"):
            await reloader(states[0]).unload("tiny")
        assert {} == reloader(states[0]).differing()
        assert ["tiny"] == list(served(states[0]))
        service.is_alone = False
        await reloader(states[0]).unload("tiny")
        assert [{}, {}] == [served(state) for state in states]

    following(states, check)
