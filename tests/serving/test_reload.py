"""Models change under load: no request fails, no request gets results of two versions, and an unloaded model frees its memory."""

import asyncio
import gc
import shutil
import weakref
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from bertserve.service.app_state import AppState
from bertserve.service.auth import Authenticator
from bertserve.service.errors import InvalidValueError, StartError
from bertserve.service.models import loading
from bertserve.service.models.model import Model
from bertserve.service.models.reloader import without_folders
from support import metric, tiny, until
from support.app_client import error_of, keys, serving, state_of
from support.fakes import wrap_sessions

ADMIN = {"authorization": "Bearer trident"}
BODY = {"inputs": "good"}


def admin_client(state: AppState, folder: Path) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return serving(state, Authenticator(admin_key_file=keys(folder, "trident")))


async def scores(client: httpx.AsyncClient, name: str = "tiny") -> tuple[float, ...]:
    """Returns the scores of a text, which are different for a model with other weights."""
    answer = await client.post(f"/models/{name}", json=BODY)
    assert answer.status_code == 200, answer.text
    return tuple(item["score"] for item in answer.json()[0])


async def test_a_model_is_replaced_under_load(models: Path, tmp_path: Path) -> None:
    """Each request is answered by only one version: equal texts in a list have equal scores."""
    state = state_of(models)
    answers_seen: set[Any] = set()
    async with admin_client(state, tmp_path) as client:
        is_over = False

        async def send_until_over() -> None:
            while not is_over:
                answer = await client.post("/classify", json={"inputs": ["good"] * 20})
                assert answer.status_code == 200, answer.text
                [one] = {tuple(item["score"] for item in result) for result in answer.json()}
                answers_seen.add(one)

        clients = [asyncio.ensure_future(send_until_over()) for _ in range(8)]
        for seed in (1, 2, 3):
            await until(lambda seed=seed: len(answers_seen) == seed)
            shutil.rmtree(models / "tiny")
            tiny.bundle(models, "tiny", seed=seed)
            answer = await client.post("/models/tiny/load", headers=ADMIN)
            assert (answer.status_code, answer.json()["version"]) == (200, state.registry.get("tiny").bundle.version)
        await until(lambda: len(answers_seen) == 4)
        is_over = True
        await asyncio.gather(*clients)
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith("bertserve_model_info{")]
        assert len(lines) == 4
        version = f'version="{state.registry.get("tiny").bundle.version}"'
        assert [line.endswith(" 1.0") for line in lines] == [version in line for line in lines]
    assert len(answers_seen) == 4


async def test_models_loaded_at_the_start_are_freed_without_a_collection(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server excludes these models from garbage collection, so they must not be part of a reference cycle."""
    old: list[weakref.ref[Any]] = []

    with monkeypatch.context() as patch:
        wrap_sessions(patch, lambda session: (session, old.append(weakref.ref(session)))[0])
        tiny.bundle(models, "other")
        state = state_of(models, allow_implicit_default=True)
    assert len(old) >= 2
    old += [weakref.ref(state.registry.get(name)) for name in ("tiny", "other")]
    try:
        async with admin_client(state, tmp_path) as client:
            gc.collect()
            gc.freeze()
            gc.disable()
            await client.post("/models/other", json=BODY, headers={"x-request-timeout-ms": "100"})
            shutil.rmtree(models / "tiny")
            tiny.bundle(models, "tiny", seed=1)
            await client.post("/models/tiny/load", headers=ADMIN)
            await client.post("/models/other/unload", headers=ADMIN)
            await until(lambda: [part() for part in old] == [None] * len(old))
    finally:
        gc.enable()
        gc.unfreeze()


async def test_the_log_says_who_changed_which_model_and_why_it_failed(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one audit line per change. A name that no model has is the caller's text, and is not logged."""
    caplog.set_level("INFO", "bertserve.audit")
    answers: list[str] = []
    async with admin_client(state_of(models), tmp_path) as client:
        await client.post("/models/tiny/load", headers=ADMIN)
        (models / "tiny/tokenizer.json").write_text("{}")
        answers.append((await client.post("/models/tiny/load", headers=ADMIN)).json()["error"])
        await client.post("/models/tiny/unload", headers=ADMIN)
        await client.post("/models/hunter2/unload", headers=ADMIN)
    audit = [vars(record) for record in caplog.records if record.name == "bertserve.audit"]
    [refusal, _] = [vars(record) for record in caplog.records if record.name == "bertserve.errors"]
    assert [(line["key"], line["action"], line["model"], line["outcome"]) for line in audit] == [
        ("default", "load", "tiny", "done"),
        ("default", "load", "tiny", "invalid_value"),
        ("default", "unload", "tiny", "done"),
        ("default", "unload", "unknown", "not_found"),
    ]
    assert refusal["model"] == "tiny"
    assert refusal["path"] == "/models/tiny/load"
    assert answers == [refusal["reason"]]
    assert "hunter2" not in str([vars(record) for record in caplog.records])


async def test_a_change_cancelled_by_shutdown_is_not_logged_as_done(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bertserve.audit")
    entry = asyncio.Event()

    async def load(name: str) -> None:
        entry.set()
        await asyncio.Event().wait()

    state = replace(state_of(models), reloader=SimpleNamespace(load=load))
    async with admin_client(state, tmp_path) as client:
        change = asyncio.ensure_future(client.post("/models/tiny/load", headers=ADMIN))
        await entry.wait()
        change.cancel()
        await asyncio.wait([change])
    assert [vars(record)["outcome"] for record in caplog.records if record.name == "bertserve.audit"] == ["cancelled"]


async def test_the_old_model_keeps_serving_if_its_new_bundle_is_broken(models: Path, tmp_path: Path) -> None:
    state = state_of(models)
    async with admin_client(state, tmp_path) as client:
        before = await scores(client)
        (models / "tiny/tokenizer.json").write_text("{}")
        assert "`tiny/tokenizer.json`" in error_of(await client.post("/models/tiny/load", headers=ADMIN), 422, "invalid_value")
        assert await scores(client) == before
        assert "`tiny/tokenizer.json`" in (await client.get("/models/tiny")).json()["broken"]
        assert 'broken_models{model="tiny"} 1.0' in (await client.get("/metrics")).text
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "tiny", seed=1)
        assert (await client.post("/models/tiny/load", headers=ADMIN)).status_code == 200
        assert await scores(client) != before
        assert "broken" not in (await client.get("/models/tiny")).json()
        assert 'broken_models{model="tiny"} 0.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`/models/tiny/manifest.json` is missing", "`tiny/manifest.json` is missing"),
        ("no bundle in /models.", "no bundle in models."),
        ("`/models-old/tiny`, `/data/models/tiny`", "`/models-old/tiny`, `/data/models/tiny`"),
        ("`/models/a/tiny` in `/models/a`", "`tiny` in `a`"),
    ],
)
def test_a_message_for_callers_names_folders_without_their_paths(message: str, expected: str) -> None:
    assert without_folders(message, [Path("/models"), Path("/models/a"), Path("tiny").parent]) == expected


@pytest.mark.parametrize(("action", "status"), [("load", 404), ("reload", 404), ("unload", 200)])
async def test_a_broken_bundle_is_forgotten_when_it_is_gone_or_unloaded(
    models: Path, tmp_path: Path, action: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bertserve.audit")
    state = state_of(models)
    async with admin_client(state, tmp_path) as client:
        (tiny.bundle(models, "other") / "tokenizer.json").write_text("{}")
        error_of(await client.post("/models/other/load", headers=ADMIN), 422, "invalid_value")
        assert list(state.registry.broken) == ["other"]
        if action != "unload":
            shutil.rmtree(models / "other")
        assert (await client.post(f"/models/other/{action}", headers=ADMIN)).status_code == status
        assert list(state.registry.broken) == []
        assert metric((await client.get("/metrics")).text, "broken_models") == 0
    [*_, audit] = [vars(record) for record in caplog.records if record.name == "bertserve.audit"]
    assert (audit["action"], audit["model"], audit["outcome"]) == (action, "other", "done" if status == 200 else "not_found")


async def test_an_endpoint_follows_loads_and_unloads(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.bundle(models, "other", seed=1)
    state = state_of(models, default={"classify": "tiny"})
    async with admin_client(state, tmp_path) as client:

        async def default_model() -> str:
            return (await client.post("/classify", json=BODY)).headers.get("x-model", "none")

        assert await default_model() == "tiny"
        assert (await client.post("/models/tiny/unload", headers=ADMIN)).json() == {"name": "tiny", "unloaded": True}
        assert await default_model() == "other"
        assert "/classify is other (before: tiny)" in caplog.text
        error_of(await client.post("/models/tiny/unload", headers=ADMIN), 404, "not_found")
        await client.post("/models/other/unload", headers=ADMIN)
        assert ": none" in error_of(await client.post("/classify", json=BODY), 404, "not_found")
        assert (await client.post("/models/tiny/load", headers=ADMIN)).status_code == 200
        assert await default_model() == "tiny"
        error_of(await client.post("/models/nobody/load", headers=ADMIN), 404, "not_found")


async def test_a_refresh_makes_the_models_match_the_folders(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("broken", "gone", "same"):
        tiny.bundle(models, name)
    state = state_of(models, default={"classify": "same"})
    before = dict(state.registry.models)
    reloader = state.reloader
    shutil.rmtree(models / "gone")
    shutil.rmtree(models / "tiny")
    tiny.bundle(models, "tiny", seed=1)
    tiny.bundle(models, "new")
    (models / "broken/tokenizer.json").write_text("{}")
    await reloader.refresh()
    after = state.registry.models

    assert list(after) == ["broken", "new", "same", "tiny"]
    assert [after[name] is before[name] for name in ("broken", "same", "tiny")] == [True, True, False]
    assert "model broken" in caplog.text
    assert list(state.registry.broken) == ["broken"]
    with pytest.raises(InvalidValueError) as error:
        await reloader.load("broken")
    cause = error.value.__cause__
    assert isinstance(cause, StartError)
    assert cause.__cause__ is not cause
    shutil.rmtree(models / "broken")
    await reloader.refresh()
    assert (list(state.registry.broken), list(state.registry.models)) == ([], ["new", "same", "tiny"])
    after = state.registry.models
    shutil.rmtree(models)
    await reloader.refresh()
    assert list(after) == list(state.registry.models)
    assert "cannot reload" in caplog.text


@pytest.mark.parametrize("error", [MemoryError("swordfish"), RuntimeError("can't start new thread")])
async def test_a_failed_bundle_does_not_affect_others_in_a_refresh_or_start(
    models: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = loading.load_model

    def fail_to_load(path: Path, model: Model | None = None, **options: Any) -> Model:
        if path.name == "first":
            raise error
        return load(path, model, **options)

    monkeypatch.setattr(loading, "load_model", fail_to_load)
    tiny.bundle(models, "gone")
    state = state_of(models, default={"classify": "tiny"})
    for name in ("first", "second"):
        tiny.bundle(models, name)
    shutil.rmtree(models / "gone")
    await state.reloader.refresh()
    assert (list(state.registry.models), list(state.registry.broken)) == (["second", "tiny"], ["first"])
    assert metric(state.metrics.render().decode(), "broken_models", model="first") == 1
    [message] = [record.getMessage() for record in caplog.records if "fail_to_load (test_reload.py:" in record.getMessage()]
    assert type(error).__name__ in message
    assert str(error) not in caplog.text
    with pytest.raises(InvalidValueError, match=type(error).__name__):
        await state.reloader.load("first")
    assert list(state_of(models, default={"classify": "tiny"}, skip_broken=True).registry.broken) == ["first"]


@pytest.mark.parametrize("what", ["twins", "not a name"])
async def test_the_error_for_an_invalid_folder_says_why(models: Path, tmp_path: Path, what: str) -> None:
    other = tmp_path / "other"
    tiny.bundle(other, "second")
    state = state_of(f"{models},{other}", allow_implicit_default=True)
    if what == "twins":
        tiny.bundle(other, "tiny")
    else:
        (models / what).mkdir()
    with pytest.raises(InvalidValueError) as error:
        await state.reloader.load("tiny" if what == "twins" else what)
    reason = error.value.message.partition(": ")[2]
    assert len(reason) > 20
    assert str(tmp_path) not in error.value.message
    assert list(state.registry.models) == ["second", "tiny"]


async def test_a_folder_that_cannot_be_a_model_does_not_affect_others(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(models)
    old = state.registry.get("tiny")
    (models / "new model").mkdir()
    shutil.rmtree(models / "tiny")
    tiny.bundle(models, "tiny", seed=1)
    await state.reloader.refresh()
    first = state.registry.get("tiny")
    assert "new model" in caplog.text
    (models / "config.json").write_text("{}")  # as in a checkpoint
    second = await state.reloader.load("tiny")
    assert len({old, first, second}) == 3
    assert list(state.registry.models) == ["tiny"]


@pytest.mark.parametrize("path", ["/models/tiny/load", "/models/tiny/unload"])
async def test_a_request_changes_no_models_without_admin_keys_or_with_several_workers(models: Path, tmp_path: Path, path: str) -> None:
    """It would reach only one of several workers. The answer says what to do instead."""
    async with serving(state_of(models)) as client:
        assert "--admin-key-file" in error_of(await client.post(path), 403, "forbidden")
    state = state_of(models, workers=2)
    async with admin_client(state, tmp_path) as client:
        assert "SIGHUP" in error_of(await client.post(path, headers=ADMIN), 409, "conflict")
    assert list(state.registry.models) == ["tiny"]
