"""Model changes with several workers: each worker makes them in the same order, and the caller learns where a change failed."""

from __future__ import annotations

import asyncio
import errno
import pickle
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import play, rejected
from bertserve.service.api.auth import Authenticator
from bertserve.service.api_keys import ApiKeys
from bertserve.service.errors import InvalidValueError, NotFoundError, ServerError, UnavailableError
from bertserve.service.models.build import AppState, build
from bertserve.service.models.reloader import SharedReloader
from bertserve.service.models.workers import Change, ReloadLog, Report, WorkerContext
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


def following(states: list[AppState], check: Callable[[], Awaitable[None]]) -> None:
    """Lets the workers report to the log, then runs a check."""

    async def run() -> None:
        for state in states:
            reloader(state).report()
        await asyncio.wait_for(check(), 20)

    asyncio.run(run())


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


def test_a_difference_between_workers_is_reported(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the change is an error, and the model pages show the difference until it ends."""
    monkeypatch.setattr("bertserve.service.models.reloader.WAIT_S", 0.0)
    monkeypatch.setattr("bertserve.service.models.reloader.WAIT_FACTOR", 0.0)
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
