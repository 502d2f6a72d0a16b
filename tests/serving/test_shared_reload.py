"""Models change while several workers serve them: all follow in one order, later ones too, and who asked hears where one did not."""

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
    """Two workers in this process, with the log that a supervisor keeps. Messages go through the event loop, as through pipes.

    Attributes:
        log: The log.
        states: The workers.
        is_alone: Whether the workers cannot reach the log.
    """

    def __init__(self, models: Path, **settings: Any) -> None:
        self.log, self.is_alone = ReloadLog(2, self._send), False
        self._settings, self._folder = Settings(models=models, workers=2, threads=2, **settings), models.parent
        self.states = [self._started(index) for index in (0, 1)]

    def replace(self, index: int) -> None:
        """Ends a worker, and starts another in its place, which does not follow yet."""
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
    """Runs a check while workers follow."""

    async def run() -> None:
        for state in states:
            reloader(state).report()
        await asyncio.wait_for(check(), 20)

    asyncio.run(run())


def refusing(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(bundle: Bundle) -> Model:
        raise BundleError("there is not enough memory.")

    monkeypatch.setattr(state.reloader, "_load", load)


def test_what_one_is_asked_all_do(models: Path) -> None:
    """Once it is answered all have the same models; also of two changes that are asked of two workers at once."""
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


def test_a_bad_bundle_changes_nothing_anywhere(models: Path) -> None:
    states = Service(models).states
    before = served(states[0])

    async def check() -> None:
        (models / "tiny/tokenizer.json").write_text("{}")
        with pytest.raises(InvalidValueError, match="`tiny/tokenizer"):
            await reloader(states[0]).load("tiny")
        assert [before] * 2 == [served(state) for state in states]

    following(states, check)


def test_a_worker_that_cannot_follow_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has its reason, the models' page both versions; to unload the model ends the difference."""
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
        await reloader(states[1]).unload("new")  # which only the other one has
        await reloader(states[1]).unload("tiny")
        assert [{}, {}] == [served(state) for state in states]
        assert {} == reloader(states[0]).differing()

    following(states, check)


def test_a_worker_that_comes_later_has_what_its_predecessor_had(models: Path) -> None:
    """Unloaded and never loaded models stay away, a broken bundle does not stop the others, and a missed refresh is repeated."""
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
    """Workers with the same versions answer an endpoint with different models."""
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


def test_a_worker_that_comes_later_says_that_a_bundle_was_replaced(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It serves the new version, which the other workers do not have before a refresh."""
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
def test_a_worker_that_comes_later_serves_what_it_can(models: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bundle that cannot be loaded now, whatever is in the folders meanwhile."""
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


def test_a_worker_without_models_is_followed_by_one_without(models: Path) -> None:
    service = Service(models)

    async def change() -> None:
        await reloader(service.states[0]).unload("tiny")

    following(service.states, change)
    service.replace(1)
    assert {} == served(service.states[1])


def logged() -> tuple[ReloadLog, list[tuple[int, Change | Report]]]:
    """Returns a log of two workers that follow, and what it sends."""
    sent: list[tuple[int, Change | Report]] = []
    log = ReloadLog(2, lambda index, message: sent.append((index, message)))
    for index in (0, 1):
        log.take(Report(index, {"tiny": "1"}, {}, {}))
    sent.clear()
    return log, sent


def test_what_a_worker_ended_of_is_not_tried_again() -> None:
    """A model whose loading ends the process would otherwise end each process that takes its place; whoever asked hears of it."""
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
    """Nobody waits for the result of a SIGHUP, so the log asks for another one, unless the service stops."""
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


def test_a_worker_that_ends_before_it_follows_leaves_its_changes_to_the_next() -> None:
    """What was asked for while no worker was in the place is made by the one that comes."""
    log, sent = logged()
    change = Change("load", "tiny", 0)
    log.on_end(1)
    log.take(change)
    log.on_end(1)
    assert [(0, change)] == sent
    log.take(Report(1, {}, {}, {}))
    assert (1, change) == sent[-1]


def test_changes_have_an_order() -> None:
    """All workers get the changes in one order, and each of them gets the next one when it has made the one before."""
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


def test_one_refresh_waits_for_each_worker() -> None:
    """Each worker makes one that starts after the last request, and all other changes in the same order."""
    log, sent = logged()
    refresh, first, second = Change("refresh"), Change("load", "a", 0, 0), Change("load", "b", 0, 1)

    def made(index: int) -> None:
        log.take(Report(index, {}, {}, {}, [message for to, message in sent if to == index and isinstance(message, Change)][-1]))

    log.take(first)
    made(0)
    for _ in range(3):
        log.take(refresh)  # worker 0 makes the first one and waits with the second, worker 1 waits with the first one
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


def test_a_worker_that_starts_refreshes_once() -> None:
    log, sent = logged()
    log.on_end(1)
    for _ in range(3):
        log.take(Change("refresh"))
    log.take(Report(1, {}, {}, {}))
    log.take(Report(1, {}, {}, {}, Change("refresh")))
    assert [Change("refresh")] == [message for to, message in sent if to == 1 and isinstance(message, Change)]


def test_a_difference_is_told(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the answer to whoever asked for the change, and by the models' pages until it has ended."""
    monkeypatch.setattr("bertserve.service.serving.reloader.WAIT_S", 0.0)
    monkeypatch.setattr("bertserve.service.serving.reloader.WAIT_FACTOR", 0.0)
    (tmp_path / "admin").write_text("trident")
    service = Service(models)
    state = service.states[0]
    version = served(state)["tiny"]
    monkeypatch.setattr(reloader(service.states[1]), "receive", lambda message: None)  # it hangs

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


def test_a_supervisor_that_cannot_be_reached_changes_nothing(models: Path) -> None:
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
