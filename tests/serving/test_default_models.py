"""Which model answers where a request names none: chosen by the operator where several could, and never moved silently."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from application import call
from bertserve.service.check import check
from bertserve.service.cli import main
from bertserve.service.errors import NotFoundError, SettingsError, StartError
from bertserve.service.process import logs
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.registry import DEFAULTS_FILE
from bertserve.service.serving.reloader import Reloader
from bertserve.service.serving.workers import WorkerContext
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from embedded import ROOT

NLI = ("contradiction", "entailment")


def made(folder: Path, **models: Any) -> Path:
    """Writes tiny bundles, each of some labels or of another task, and returns their folder."""
    for name, what in models.items():
        tiny.bundle(folder, name, **({"task": what} if isinstance(what, str) else {"labels": what}))
    return folder


def state_of(folder: Path, **settings: Any) -> AppState:
    return build(Settings(models=folder, **settings))


def used(state: AppState) -> dict[str, str]:
    """Returns task -> name of the model that its endpoint uses."""
    return state.registry.defaults


# At the start


def test_two_models_of_a_task_need_a_default(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r" /classify \(`a`, `b`\); .* --default classify=NAME, .* --allow-implicit-default\."):
        state_of(made(tmp_path, a=tiny.LABELS, b=tiny.LABELS))


def test_every_task_that_is_open_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        state_of(
            made(tmp_path, mood=tiny.LABELS, nli=NLI, mnli=NLI, rank=("score",), one="feature-extraction", two="feature-extraction"),
        )

    assert " /classify (`mnli`, `mood`, `nli`, `rank`); /embed (`one`, `two`); /zero-shot (`mnli`, `nli`); " in raised.value.message
    assert "--default classify=NAME,embed=NAME,zero-shot=NAME," in raised.value.message


@pytest.mark.parametrize(
    ("models", "settings", "expected"),
    [
        ({"b": tiny.LABELS}, {}, {"text-classification": "b"}),
        ({"a": tiny.LABELS, "b": tiny.LABELS}, {"default": {"classify": "b"}}, {"text-classification": "b"}),
        ({"a": tiny.LABELS, "b": tiny.LABELS}, {"allow_implicit_default": True}, {"text-classification": "a"}),
        (
            {"a": tiny.LABELS, "b": tiny.LABELS},
            {"allow_implicit_default": True, "default": {"classify": "b"}},
            {"text-classification": "b"},
        ),
        (
            {"a": "feature-extraction", "b": "feature-extraction"},
            {"default": {"embed": "b"}},
            {"feature-extraction": "b", "sentence-similarity": "b"},
        ),
        (
            {"a": "feature-extraction", "b": "feature-extraction"},
            {"default": {"embed": "b", "similarity": "a"}},
            {"feature-extraction": "b", "sentence-similarity": "a"},
        ),
        (
            {"a": NLI, "b": NLI, "mood": tiny.LABELS},
            {"default": {"classify": "b"}},
            {"text-classification": "b", "zero-shot-classification": "b"},
        ),
        (
            {"a": NLI, "mood": tiny.LABELS, "rank": ("score",)},
            {"default": {"classify": "mood"}},
            {"text-classification": "mood", "zero-shot-classification": "a", "text-ranking": "rank"},
        ),
    ],
)
def test_a_default_is_the_only_one_or_the_wanted_one(
    tmp_path: Path, models: dict[str, Any], settings: dict[str, Any], expected: dict[str, str]
) -> None:
    """A task that bundles of another task answer uses the default of that task, if that bundle can answer."""
    assert expected == used(state_of(made(tmp_path, **models), **settings))


def test_a_default_that_cannot_do_a_task_leaves_it_open(tmp_path: Path) -> None:
    folder = made(tmp_path, a=NLI, b=NLI, mood=tiny.LABELS)
    with pytest.raises(SettingsError, match=r" /zero-shot \(`a`, `b`\); .* --default zero-shot=NAME,"):
        state_of(folder, default={"classify": "mood"})


@pytest.mark.parametrize("stored", ["{}", '{"classify": "a"}'])
def test_a_broken_model_is_no_candidate(tmp_path: Path, stored: str) -> None:
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text(stored)
    (folder / "a/tokenizer.json").write_text("{}")
    assert {"text-classification": "b"} == used(state_of(folder, skip_broken=True))


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_check_refuses_what_a_start_refuses(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same exit code and the same line: models without a default, keys that cannot be read, more connections than descriptors."""
    monkeypatch.setattr(logs, "configure_logging", lambda _: None)  # those of the test run stay
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    for flags, word in (
        ((), "--default classify=NAME"),
        (("--allow-implicit-default", "--api-key-file", str(tmp_path / "none")), "none"),
        (("--allow-implicit-default", "--max-connections", "100000000"), "--max-connections"),
    ):
        assert 2 == main([command, "--models", str(folder), "--port", "0", *flags])
        assert word in capsys.readouterr().err


def test_a_check_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --skip-broken the service would start, and the line says without what."""
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / "a/tokenizer.json").write_text("{}")
    asyncio.run(check(Settings(models=folder, skip_broken=True)))
    first, second = capsys.readouterr().out.splitlines()
    assert [True, True] == [first.startswith("b: text-classification"), second.startswith("a: not loaded")]


def test_the_page_of_a_model_says_what_it_is_the_default_of(tmp_path: Path) -> None:
    folder = made(tmp_path, a=NLI, mood=tiny.LABELS)
    pages = call(folder, "GET", "/models", settings={"default": {"classify": "mood"}}).json()
    assert [("a", ["/classify", "/zero-shot"], ["/zero-shot"]), ("mood", ["/classify"], ["/classify"])] == [
        (page["name"], page["endpoints"], page["default_of"]) for page in pages
    ]


# What a models folder says


def test_a_folder_says_which_of_its_models_answers(tmp_path: Path) -> None:
    """As `--default` does, which goes over it, task by task."""
    folder = made(tmp_path, a=NLI, b=NLI, mood=tiny.LABELS, one="feature-extraction", two="feature-extraction")
    (folder / DEFAULTS_FILE).write_text('{"classify": "mood", "zero-shot-classification": "b", "embed": "two"}')

    said = {"text-classification": "mood", "zero-shot-classification": "b", "feature-extraction": "two", "sentence-similarity": "two"}
    assert said == used(state_of(folder))
    assert said | {"text-classification": "a"} == used(state_of(folder, default={"text-classification": "a"}))
    # a bundle that is given itself is not the folder
    assert "a" == used(build(Settings(models=(folder / "a",))))["text-classification"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[", "valid JSON"),
        ('{"classify": 1}', "`classify`"),
        ('{"clasify": "a"}', "`clasify`"),
        ('{"classify": "a", "text-classification": "b"}', "`text-classification`"),
        ('{"classify": "c"}', "`c`"),
        ('{"embed": "a"}', "`a`"),
    ],
)
def test_a_folder_that_says_nonsense_is_refused(tmp_path: Path, text: str, value: str) -> None:
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text(text)

    with pytest.raises(StartError) as raised:
        state_of(folder)
    assert value in raised.value.message
    assert f"`{folder / DEFAULTS_FILE}` " in raised.value.message


def test_folders_that_disagree_need_a_flag(tmp_path: Path) -> None:
    folders = made(tmp_path / "one", a=tiny.LABELS), made(tmp_path / "two", b=tiny.LABELS)
    for folder, name in zip(folders, "ab", strict=True):
        (folder / DEFAULTS_FILE).write_text(f'{{"classify": "{name}"}}')

    with pytest.raises(SettingsError, match=r"`a` .* text-classification, .* `b` .* --default classify=NAME"):
        build(Settings(models=folders))
    assert {"text-classification": "b"} == used(build(Settings(models=folders, default={"classify": "b"})))


def test_the_embedded_models_answer_all_endpoints_but_three(caplog: pytest.LogCaptureFixture) -> None:
    used_by = used(build(Settings(models=ROOT / "models")))

    assert {"text-ranking", "multiple-choice", "attention"} >= set(TASKS) - set(used_by)
    assert ("sentiment", "nli", "embed", "embed") == tuple(
        used_by[task] for task in ("text-classification", "zero-shot-classification", "feature-extraction", "sentence-similarity")
    )
    assert [] == caplog.records


# While it serves


def test_a_model_that_comes_later_takes_nothing_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The default stays while it is loaded, by whatever name the other one comes, and with --allow-implicit-default too; the log says so."""
    caplog.set_level("INFO", logger="bertserve.loading")
    for number, settings in enumerate(({}, {"allow_implicit_default": True})):
        folder = made(tmp_path / str(number), b=tiny.LABELS)
        state = state_of(folder, **settings)
        made(folder, a=tiny.LABELS)
        asyncio.run(state.reloader.refresh())
        assert {"text-classification": "b"} == used(state)
        assert caplog.text.count("/classify, which still uses b") == number + 1
        shutil.rmtree(folder / "b")
        tiny.bundle(folder, "b", seed=1)
        asyncio.run(state.reloader.load("b"))
        assert state.registry.for_task("text-classification") is state.registry.get("b")
        assert "instead of" not in caplog.text


WARNING = "will fail: "


@pytest.mark.parametrize("reload", ["refresh", "load"])
def test_a_reload_warns_of_what_the_next_start_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture, reload: str) -> None:
    """It serves on, and the log names the models, the task and the flag; with a default nothing is wrong."""
    for number, (settings, warned) in enumerate(
        (({}, True), ({"default": {"classify": "b"}}, False), ({"allow_implicit_default": True}, False))
    ):
        folder = made(tmp_path / str(number), b=tiny.LABELS)
        state = state_of(folder, **settings)
        made(folder, a=tiny.LABELS)
        caplog.clear()
        asyncio.run(state.reloader.refresh() if reload == "refresh" else state.reloader.load("a"))  # type: ignore[arg-type]
        assert ["a", "b"] == list(state.registry.models)
        warnings = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
        assert warned == bool(warnings)
        assert [] == [word for word in ("`a`, `b`", "/classify", "--default classify=NAME") for line in warnings if word not in line]


def test_a_reload_warns_of_a_default_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the folder's own file names it, as that stands now; and of a broken model, unless that may be left out."""
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text('{"classify": "a"}')
    state, forgiving = state_of(folder), state_of(folder, skip_broken=True)
    shutil.rmtree(folder / "a")
    asyncio.run(state.reloader.refresh())
    assert f"{WARNING}`{folder / DEFAULTS_FILE}` makes `a`" in caplog.text
    (folder / DEFAULTS_FILE).unlink()
    (folder / "b/tokenizer.json").write_text("{}")
    for each, warned in ((state, True), (forgiving, False)):
        caplog.clear()
        asyncio.run(each.reloader.refresh())
        assert warned == (WARNING in caplog.text)


def test_a_default_that_goes_is_followed_by_the_only_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(made(tmp_path, a=tiny.LABELS, b=tiny.LABELS), default={"classify": "a"})
    asyncio.run(state.reloader.unload("a"))
    assert {"text-classification": "b"} == used(state)
    assert "b instead of a" in caplog.text
    asyncio.run(state.reloader.load("a"))
    assert {"text-classification": "a"} == used(state)
    assert "a instead of b" in caplog.text


def test_of_several_that_are_left_none_is_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = made(tmp_path, a=tiny.LABELS, b=tiny.LABELS, c=tiny.LABELS)
    state = state_of(folder, default={"classify": "a"})
    asyncio.run(state.reloader.unload("a"))
    assert {} == used(state)
    assert "but b, c can" in caplog.text
    with pytest.raises(NotFoundError, match=r"\(`b`, `c`\)"):
        state.registry.for_task("text-classification")
    assert "b" == state.registry.for_task("text-classification", "b").name
    by_name = state_of(folder, allow_implicit_default=True)
    asyncio.run(by_name.reloader.unload("a"))
    assert {"text-classification": "b"} == used(by_name)


def test_a_model_that_can_do_less_now_answers_no_more(tmp_path: Path) -> None:
    """A default whose new version has other labels is none for what it cannot do any more."""
    folder = made(tmp_path, a=NLI, b=NLI)
    state = state_of(folder, default={"classify": "a"})
    shutil.rmtree(folder / "a")
    made(folder, a=tiny.LABELS)
    asyncio.run(state.reloader.load("a"))
    assert {"text-classification": "a", "zero-shot-classification": "b"} == used(state)


class Place:
    """The place of a worker in a service of two. Each worker there reports when the next one starts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reports = folder, list[Any]()
        self._state: AppState | None = None

    def start(self) -> AppState:
        """Starts the next worker."""
        if self._state is not None:
            self._state.reloader.report()  # type: ignore[attr-defined]
        before = self._reports[-1] if self._reports else None
        context = WorkerContext(0, 2, self._folder.parent, tell=self._reports.append, before=before)
        self._state = build(Settings(models=self._folder, workers=2, threads=2), context)
        return self._state


def test_a_worker_that_comes_later_has_the_defaults_of_its_predecessor(tmp_path: Path) -> None:
    """A later worker has the defaults of its predecessor, not the defaults by the names of the served models."""
    place = Place(made(tmp_path / "models", b=tiny.LABELS))
    first = place.start()
    made(tmp_path / "models", a=tiny.LABELS)
    asyncio.run(first.reloader.refresh())

    assert {"text-classification": "b"} == used(first) == used(place.start())


@pytest.mark.parametrize("changed", ['{"classify": "b"}', '{"classify": "c"}', "{"])
def test_a_worker_that_comes_later_has_the_choices_of_its_predecessor(tmp_path: Path, changed: str) -> None:
    """Other workers do not read `defaults.json` again, so a later worker does not either. A choice survives that its model is gone."""
    folder = made(tmp_path / "models", a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text('{"classify": "a"}')
    place = Place(folder)
    place.start()
    (folder / DEFAULTS_FILE).write_text(changed)
    for _ in range(2):
        later = place.start()
        assert {"text-classification": "a"} == used(later)
    asyncio.run(Reloader.unload(later.reloader, "a"))
    last = place.start()
    assert {"text-classification": "b"} == used(later) == used(last)
    asyncio.run(Reloader.load(last.reloader, "a"))
    assert {"text-classification": "a"} == used(last)
