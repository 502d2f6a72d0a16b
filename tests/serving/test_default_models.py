"""The default model of a task: chosen by the operator if several models are candidates, and stable while it is loaded."""

import shutil
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.check import check
from bertserve.service.errors import HttpError, SettingsError, StartError
from bertserve.service.models.default_models import DEFAULTS_FILE
from bertserve.service.settings import Settings
from support import raises_exactly, tiny
from support.app_client import state_of

NLI = ("contradiction", "entailment")


def write(folder: Path, **models: Any) -> Path:
    """Writes tiny bundles, each with its labels or its task, and returns their folder."""
    for name, what in models.items():
        tiny.bundle(folder, name, **({"task": what} if isinstance(what, str) else {"labels": what}))
    return folder


def test_the_error_lists_every_task_without_a_default(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        state_of(write(tmp_path, mood=tiny.LABELS, nli=NLI, mnli=NLI, rank=("score",), one="feature-extraction", two="feature-extraction"))

    assert " /classify (`mnli`, `mood`, `nli`, `rank`); /embed (`one`, `two`); /zero-shot (`mnli`, `nli`); " in error.value.message
    assert "--default classify=NAME,embed=NAME,zero-shot=NAME," in error.value.message


@pytest.mark.parametrize(
    ("models", "settings", "expected"),
    [
        ({"b": tiny.LABELS}, {}, {"text-classification": "b"}),
        ({"a": tiny.LABELS, "b": tiny.LABELS}, {"default": {"classify": "b"}}, {"text-classification": "b"}),
        ({"a": tiny.LABELS, "b": tiny.LABELS}, {"allow_implicit_default": True}, {"text-classification": "a"}),
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
def test_the_default_is_the_only_candidate_or_the_configured_model(
    tmp_path: Path, models: dict[str, Any], settings: dict[str, Any], expected: dict[str, str]
) -> None:
    """A derived task uses the default of its base task, if that model is compatible."""
    assert state_of(write(tmp_path, **models), **settings).registry.defaults == expected


@pytest.mark.parametrize(("file_text", "defaults"), [("{}", {"text-classification": "b"}), ('{"classify": "a"}', {})])
async def test_a_broken_model_is_not_a_candidate_and_check_lists_it(
    tmp_path: Path, file_text: str, defaults: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text(file_text)
    (folder / "a/tokenizer.json").write_text("{}")
    assert state_of(folder, skip_broken=True).registry.defaults == defaults
    await check(Settings(models=folder, skip_broken=True))
    first, second = capsys.readouterr().out.splitlines()
    assert [first.startswith("b: text-classification"), second.startswith("a: not loaded")] == [True, True]


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("others", ["b", "bc"])
async def test_a_broken_default_needs_no_other_choice_and_returns_when_repaired(tmp_path: Path, by_file: bool, others: str) -> None:
    folder = write(tmp_path, **dict.fromkeys(f"a{others}", tiny.LABELS))
    tokenizer = (folder / "a/tokenizer.json").read_bytes()
    (folder / "a/tokenizer.json").write_text("{}")
    if by_file:
        (folder / DEFAULTS_FILE).write_text('{"classify": "a"}')
    state = state_of(folder, skip_broken=True, default={} if by_file else {"classify": "a"})
    assert state.registry.defaults == {}
    (folder / "a/tokenizer.json").write_bytes(tokenizer)
    await state.reloader.load("a")
    assert state.registry.defaults == {"text-classification": "a"}


def test_defaults_json_of_a_folder_sets_the_default_models(tmp_path: Path) -> None:
    """`--default` overrides the file, task by task."""
    folder = write(tmp_path, a=NLI, b=NLI, mood=tiny.LABELS, one="feature-extraction", two="feature-extraction")
    (folder / DEFAULTS_FILE).write_text('{"classify": "mood", "zero-shot-classification": "b", "embed": "two"}')

    defaults = {"text-classification": "mood", "zero-shot-classification": "b", "feature-extraction": "two", "sentence-similarity": "two"}
    assert state_of(folder).registry.defaults == defaults
    assert state_of(folder, default={"text-classification": "a"}).registry.defaults == defaults | {"text-classification": "a"}
    # if --models has the path of a bundle, the file in its folder is not read
    assert state_of((folder / "a",)).registry.defaults["text-classification"] == "a"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"classify": 1}', "`classify`"),
        ('{"classify": "a", "text-classification": "b"}', "`text-classification`"),
        ('{"classify": "c"}', "`c`"),
        ('{"embed": "a"}', "`a`"),
    ],
)
async def test_a_start_refuses_an_invalid_defaults_json_and_each_change_warns_of_it(
    tmp_path: Path, text: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, a=tiny.LABELS, b=tiny.LABELS)
    (folder / DEFAULTS_FILE).write_text('{"classify": "a"}')
    reloader = state_of(folder).reloader
    (folder / DEFAULTS_FILE).write_text(text)

    with pytest.raises(StartError) as error:
        state_of(folder)
    assert value in error.value.message
    assert f"`{folder / DEFAULTS_FILE}` " in error.value.message
    for change in (reloader.refresh(), reloader.load("b"), reloader.unload("b")):
        await change
    assert caplog.messages.count(f"the next start with these settings will fail: {error.value.message}") == 3


def test_conflicting_defaults_of_two_folders_need_a_flag(tmp_path: Path) -> None:
    folders = write(tmp_path / "one", a=tiny.LABELS), write(tmp_path / "two", b=tiny.LABELS)
    for folder, name in zip(folders, "ab", strict=True):
        (folder / DEFAULTS_FILE).write_text(f'{{"classify": "{name}"}}')

    with pytest.raises(SettingsError, match=r"`b` .*`classify`, .* `a`; .* --default classify=NAME"):
        state_of(folders)
    assert state_of(folders, default={"classify": "b"}).registry.defaults == {"text-classification": "b"}


async def test_a_model_loaded_later_does_not_replace_a_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="bertserve.loading")
    for number, settings in enumerate(({}, {"allow_implicit_default": True})):
        folder = write(tmp_path / str(number), b=tiny.LABELS)
        state = state_of(folder, **settings)
        write(folder, a=tiny.LABELS)
        await state.reloader.refresh()
        assert state.registry.defaults == {"text-classification": "b"}
        shutil.rmtree(folder / "b")
        tiny.bundle(folder, "b", seed=1)
        await state.reloader.load("b")
        assert state.registry.for_task("text-classification") is state.registry.get("b")
        assert "the default of /classify" not in caplog.text
        assert "the model a can also answer /classify, which still uses b" in caplog.messages
    assert caplog.text.count("the next start with these settings will fail: several models can answer /classify") == 2


@pytest.mark.parametrize("skip_broken", [True, False])
async def test_a_new_broken_folder_is_part_of_the_next_start_unless_it_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, skip_broken: bool
) -> None:
    folder = write(tmp_path, a=tiny.LABELS)
    reloader = state_of(folder, skip_broken=skip_broken).reloader
    (folder / "broken").mkdir()
    (folder / "broken" / "manifest.json").write_text("{}")
    await reloader.load("a")
    assert ("the next start with these settings will fail" in caplog.text) is not skip_broken


async def test_several_candidates_do_not_replace_an_unloaded_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, a=tiny.LABELS, b=tiny.LABELS, c=tiny.LABELS)
    state = state_of(folder, default={"classify": "a"})
    await state.reloader.unload("a")
    assert state.registry.defaults == {}
    assert "/classify" in caplog.text
    assert "`b`, `c`" in caplog.text
    assert "the next start" not in caplog.text  # it loads `a` again
    with raises_exactly(HttpError, match="`b`, `c`") as caught:
        state.registry.for_task("text-classification")
    assert caught.value.status == HTTPStatus.NOT_FOUND
    assert state.registry.for_task("text-classification", "b").name == "b"
    by_name = state_of(folder, allow_implicit_default=True)
    await by_name.reloader.unload("a")
    assert by_name.registry.defaults == {"text-classification": "b"}
    shutil.rmtree(folder / "a")
    await state.reloader.refresh()
    assert "the next start with these settings will fail: --default makes `a`" in caplog.text


async def test_a_new_version_loses_the_default_of_an_incompatible_task(tmp_path: Path) -> None:
    """The new version has no entailment label: it remains the default of `/classify`, and `/zero-shot` uses the other model."""
    folder = write(tmp_path, a=NLI, b=NLI)
    state = state_of(folder, default={"classify": "a"})
    shutil.rmtree(folder / "a")
    write(folder, a=tiny.LABELS)
    await state.reloader.load("a")
    assert state.registry.defaults == {"text-classification": "a", "zero-shot-classification": "b"}
