"""Models change while several workers serve them: all follow in one order, later ones too, and who asked hears where one did not."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import play, rejected
from bertserve.service.api_keys import ApiKeys
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BundleError, InvalidValueError, NotFoundError, PartialChangeError, UnavailableError
from bertserve.service.http.auth import Authenticator
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.change_log import Change, ChangeLog, Outcome, Progress
from bertserve.service.serving.model import Model
from bertserve.service.serving.shared_reloader import POLL_S, SharedReloader
from bertserve.service.serving.worker_context import WorkerContext
from bertserve.service.settings import Settings


def worker(models: Path, folder: Path, index: int, **settings: Any) -> AppState:
    """Returns one of two workers, in this process."""
    return build(Settings(models=models, workers=2, lanes=2, **settings), WorkerContext(index, 2, folder))


def reloader(state: AppState) -> SharedReloader:
    """Returns what changes a worker's models."""
    assert isinstance(state.reloader, SharedReloader)
    return state.reloader


def served(state: AppState) -> dict[str, str]:
    """Returns name -> version of a worker's models."""
    return {name: model.bundle.version for name, model in state.registry.models.items()}


def following(states: list[AppState], check: Callable[[], Awaitable[None]]) -> None:
    """Runs a check while workers follow."""

    async def run() -> None:
        tasks = [asyncio.ensure_future(reloader(state).follow()) for state in states]
        try:
            await asyncio.wait_for(check(), 20)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(run())


def refusing(state: AppState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a worker fail to load anything."""

    def load(bundle: Bundle) -> Model:
        raise BundleError("there is not enough memory.")

    monkeypatch.setattr(state.reloader, "_load", load)


def test_what_one_is_asked_all_do(models: Path, tmp_path: Path) -> None:
    """Once it is answered all have the same models; also of two changes that are asked of two workers at once."""
    tiny.bundle(models, "other")
    states = [worker(models, tmp_path, index, default_by_name=True) for index in (0, 1)]
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
        with pytest.raises(NotFoundError, match="no model `other` is loaded"):
            await reloader(states[1]).unload("other")
        with pytest.raises(NotFoundError, match="no models folder has a bundle `nobody`"):
            await reloader(states[1]).load("nobody")

    following(states, check)


def test_a_bad_bundle_changes_nothing_anywhere(models: Path, tmp_path: Path) -> None:
    """What no worker can load is the error that it is with one worker."""
    states = [worker(models, tmp_path, index) for index in (0, 1)]
    before = served(states[0])

    async def check() -> None:
        (models / "tiny/tokenizer.json").write_text("{}")
        with pytest.raises(InvalidValueError, match="nothing changed: bundle file `tiny/tokenizer"):
            await reloader(states[0]).load("tiny")
        assert [before] * 2 == [served(state) for state in states]

    following(states, check)


def test_a_worker_that_cannot_follow_is_named(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has its reason, the models' page both versions; to unload the model ends the difference."""
    states = [worker(models, tmp_path, index) for index in (0, 1)]
    before = served(states[0])["tiny"]
    refusing(states[1], monkeypatch)

    async def check() -> None:
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        for state in states:
            with pytest.raises(PartialChangeError, match=r"done by worker 0, and not by worker 1 \(.*not enough memory"):
                await reloader(state).load("tiny")
        after = served(states[0])["tiny"]
        shown = [{"index": 0, "version": after}, {"index": 1, "version": before, "broken": "there is not enough memory."}]
        assert [{"tiny": shown}] * 2 == [reloader(state).differing() for state in states]
        tiny.bundle(models, "new")
        with pytest.raises(PartialChangeError):
            await reloader(states[1]).load("new")
        await reloader(states[1]).unload("new")  # which only the other one has
        await reloader(states[1]).unload("tiny")
        assert [{}, {}] == [served(state) for state in states]
        assert {} == reloader(states[0]).differing()

    following(states, check)


def test_a_worker_that_comes_later_has_what_its_predecessor_had(models: Path, tmp_path: Path) -> None:
    """What was unloaded stays away, what was never loaded too, a broken bundle keeps nobody from the others, and what it missed it makes."""
    tiny.bundle(models, "broken")
    tiny.bundle(models, "gone")
    states = [worker(models, tmp_path, index, default={"classify": "gone"}) for index in (0, 1)]

    async def change() -> None:
        await reloader(states[0]).unload("gone")

    following(states, change)
    tiny.bundle(models, "never")
    (models / "broken/tokenizer.json").write_text("{}")
    later = worker(models, tmp_path, 1, default={"classify": "gone"})
    assert ["tiny"] == list(served(later))
    assert "was altered" in later.broken["broken"]
    number = ChangeLog(tmp_path / "changes").append(Change("refresh"))

    async def followed() -> None:
        while number not in reloader(later)._progress.outcomes:
            await asyncio.sleep(0.01)
        assert ["gone", "never", "tiny"] == list(served(later))

    following([later], followed)


def test_a_worker_without_models_is_followed_by_one_without(models: Path, tmp_path: Path) -> None:
    """All of them may be unloaded, and a worker be replaced then."""
    states = [worker(models, tmp_path, index) for index in (0, 1)]

    async def change() -> None:
        await reloader(states[0]).unload("tiny")

    following(states, change)
    assert {} == served(worker(models, tmp_path, 1))


def test_what_a_worker_ended_of_is_not_tried_again(models: Path, tmp_path: Path) -> None:
    """A model whose loading ends the process would otherwise end each process that takes its place."""
    state = worker(models, tmp_path, 0)
    log = ChangeLog(tmp_path / "changes")
    number = log.append(Change("load", "tiny"))
    log.publish(0, Progress(done=0, trying=number, served=served(state)))
    later = worker(models, tmp_path, 0)

    assert (number, Outcome(error="it ended while it did this")) == (
        reloader(later)._progress.done,
        reloader(later)._progress.outcomes[number],
    )


def test_changes_have_an_order(tmp_path: Path) -> None:
    """Whoever appends, each change has the next number, and none is read before it is whole."""
    one, other = ChangeLog(tmp_path / "log"), ChangeLog(tmp_path / "log")
    changes = [Change("load", "\u00e4"), Change("unload", "b"), Change("refresh")]

    assert [1, 2, 3] == [log.append(change) for log, change in zip((one, other, one), changes, strict=True)]
    assert [*changes, None] == [other.read(number) for number in (1, 2, 3, 4)]
    assert None is one.progress(0)


def test_a_difference_is_told(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the answer to whoever asked for the change, and by the models' pages until it has ended."""
    monkeypatch.setattr("bertserve.service.serving.shared_reloader.WAIT_S", 0.0)
    monkeypatch.setattr("bertserve.service.serving.shared_reloader.WAIT_FACTOR", 0.0)
    (tmp_path / "admin").write_text("trident")
    state = worker(models, tmp_path, 0)
    log, version = ChangeLog(tmp_path / "changes"), served(state)["tiny"]
    log.publish(1, Progress(served={"tiny": "1" * 64, "elsewhere": "2" * 64}))

    async def check(client: httpx.AsyncClient) -> None:
        following = asyncio.ensure_future(reloader(state).follow())
        answer = await client.post("/models/tiny/reload", headers={"authorization": "Bearer trident"})
        assert "not by worker 1 (it has not done it yet)" in rejected(answer, 500, "partial_change")
        answer = await client.post("/models/elsewhere/unload", headers={"authorization": "Bearer trident"})
        assert "done by worker none" in rejected(answer, 500, "partial_change")
        tiny_workers = [{"index": 0, "version": version}, {"index": 1, "version": "1" * 64}]
        [elsewhere, shown] = sorted((await client.get("/models")).json(), key=lambda model: model["name"])
        assert tiny_workers == shown["workers"] == (await client.get("/models/tiny")).json()["workers"]
        assert {"name": "elsewhere", "workers": [{"index": 0, "version": None}, {"index": 1, "version": "2" * 64}]} == elsewhere
        log.publish(1, Progress(served={"tiny": version}))
        assert "workers" not in (await client.get("/models/tiny")).json()
        following.cancel()

    play(state, check, auth=Authenticator(None, admin_keys=ApiKeys(tmp_path / "admin")))


def test_a_log_that_cannot_be_used_for_a_while_stops_nobody(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room, or a descriptor, a change is refused, and nothing changes; workers go on to follow once there is some again."""
    states = [worker(models, tmp_path, index) for index in (0, 1)]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def check() -> None:
        with monkeypatch.context() as patch:
            for name in ("append", "read", "publish", "progress"):
                patch.setattr(ChangeLog, name, full)
            with pytest.raises(UnavailableError, match="No space left on device"):
                await reloader(states[0]).unload("tiny")
            await asyncio.sleep(2 * POLL_S)
            assert {} == reloader(states[0]).differing()
            assert ["tiny"] == list(served(states[0]))
        await reloader(states[0]).unload("tiny")
        assert [{}, {}] == [served(state) for state in states]

    following(states, check)
