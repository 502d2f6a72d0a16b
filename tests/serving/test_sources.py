"""`--model SOURCE`: what a source can be, the cache of exports, the export as another process, and what it says where it cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny
from bertserve.export.cli import _parser
from bertserve.service import sources
from bertserve.service.bundle.files import find_bundles
from bertserve.service.cli import main
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.settings import Settings, parse
from bertserve.service.sources import ModelSource, export_options, read_source, with_sources

pytestmark = pytest.mark.usefixtures("logging_of_pytest")

# an exporter in the place of bert-export: it copies a finished bundle, or waits, or fails
FAKE = """
    import pathlib, shutil, signal, sys, time
    arguments = sys.argv[1:]
    output, name = (pathlib.Path(arguments[arguments.index(flag) + 1]) if flag == "--output" else arguments[arguments.index(flag) + 1] for flag in ("--output", "--name"))
    with open(output.parent / "calls", "a") as calls:
        print(*arguments, file=calls)
    {behavior}
    shutil.copytree("{finished}", output / name)
"""


@pytest.fixture(name="checkpoint")
def checkpoint_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


Fake = Callable[..., None]


@pytest.fixture(name="fake")
def fake_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Returns `fake(behavior)`, which puts a quick exporter in the place of bert-export; its bundles are called `own`."""
    tiny.bundle(tmp_path / "finished", "own")

    def fake(behavior: str = "") -> None:
        script = tmp_path / "exporter.py"
        script.write_text(textwrap.dedent(FAKE).format(behavior=behavior, finished=tmp_path / "finished/own"))
        monkeypatch.setattr(sources, "export_command", lambda: [sys.executable, str(script)])

    fake()
    return fake


def settings(tmp_path: Path, *flags: str) -> Settings:
    return parse(Settings, ["--cache-dir", str(tmp_path / "cache"), *flags])


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "cache/calls"
    return file.read_text().splitlines() if file.exists() else []


# ---- what a source can be


def test_a_checkpoint_is_served(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    served = with_sources(settings(tmp_path, "--model", str(checkpoint)))

    assert ["own"] == [path.name for path in find_bundles(served.models)]
    assert tmp_path / "cache" in served.models[0].parents


def test_a_bundle_is_served_where_it_is(models: Path, tmp_path: Path) -> None:
    tiny.bundle(models, "other")
    served = with_sources(settings(tmp_path, "--model", str(models / "tiny")))

    assert [models / "tiny"] == find_bundles(served.models)


def test_folders_of_models_are_served_too_where_they_are_given(models: Path, checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    served = with_sources(settings(tmp_path, "--model", str(checkpoint), "--models", str(models)))

    assert ["own", "tiny"] == [path.name for path in find_bundles(served.models)]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/model", ModelSource("model", "org/model")),
        ("model", ModelSource("model", "model")),
        ("org/model@v1.0", ModelSource("model", "org/model", "v1.0")),
        ("mine=org/model@main", ModelSource("mine", "org/model", "main")),
    ],
)
def test_what_is_no_folder_is_a_hub_id(text: str, source: ModelSource) -> None:
    assert source == read_source(text)


def test_a_folder_may_have_a_name_of_its_own(checkpoint: Path) -> None:
    odd = checkpoint.rename(checkpoint.with_name("a=b"))
    assert ModelSource("mine", str(odd)) == read_source(f"mine={odd}")
    with pytest.raises(SettingsError, match="`a=b`"):
        read_source(str(odd))


@pytest.mark.parametrize("text", ["./none", "/none", "~/none-such", "a/b/c", "x=./none", "", "x=", "/"])
def test_a_folder_that_does_not_exist_is_said(text: str) -> None:
    with pytest.raises((SettingsError, StartError)):
        read_source(text)


@pytest.mark.parametrize("text", ["bad name=org/model", "=org/model", "org/mo del"])
def test_a_name_that_no_model_can_have_is_refused(text: str) -> None:
    if text.startswith("="):
        assert ModelSource("model", "org/model") == read_source(text)
        return
    with pytest.raises(SettingsError, match="give NAME=SOURCE"):
        read_source(text)


def test_a_folder_of_bundles_is_told_apart(models: Path) -> None:
    with pytest.raises(StartError, match=f"`{models}` .* \\(tiny\\); .* --models {models}"):
        read_source(str(models))


def test_a_bundle_keeps_its_name(models: Path) -> None:
    with pytest.raises(SettingsError, match="`tiny`"):
        read_source(f"other={models}/tiny")


def test_two_sources_of_one_name_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(checkpoint, tmp_path / "elsewhere/own")
    with pytest.raises(SettingsError, match=f"`own` twice, .* NAME={twin}"):
        with_sources(settings(tmp_path, "--model", str(checkpoint), "--model", str(twin)))


# ---- the cache


def test_the_second_start_takes_the_bundle(checkpoint: Path, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = with_sources(settings(tmp_path, "--model", str(checkpoint)))
    monkeypatch.setattr(sources, "export_command", lambda: pytest.fail("nothing is to be exported"))

    assert first.models == with_sources(settings(tmp_path, "--model", str(checkpoint))).models
    assert 1 == len(calls(tmp_path))


def test_a_bundle_without_int8_is_served_with_a_warning(
    checkpoint: Path, fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bert-export ends with 4 where int8 failed and fp32 is there; the next start uses that bundle too."""
    fake("import atexit, os; atexit.register(os._exit, 4)")
    flags = ("--model", str(checkpoint))
    first = with_sources(settings(tmp_path, *flags))

    assert f"serving {checkpoint} without" in caplog.text
    assert ["own"] == [path.name for path in find_bundles(first.models)]
    assert first.models == with_sources(settings(tmp_path, *flags)).models
    assert 1 == len(calls(tmp_path))


def test_that_exit_code_without_a_bundle_is_a_failure(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    fake("sys.exit(4)")
    with pytest.raises(SystemExit) as stopped:
        with_sources(settings(tmp_path, "--model", str(checkpoint)))

    assert 4 == stopped.value.code


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_a_changed_checkpoint_is_exported_again(changed: str, checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    (checkpoint / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (checkpoint / "1_Pooling").mkdir()
    with_sources(settings(tmp_path, "--model", str(checkpoint)))
    (checkpoint / changed).write_bytes(b"{ }")
    with_sources(settings(tmp_path, "--model", str(checkpoint)))

    assert 2 == len(calls(tmp_path))


@pytest.mark.parametrize(("place", "part"), [("", ""), ("0_Transformer", ""), ("", "0_Transformer")])
def test_the_base_of_an_adapter_is_a_part_of_it(place: str, part: str, checkpoint: Path, tmp_path: Path) -> None:
    """An adapter's answers change with the model that it was trained on, also where one of them lies in a folder of its own."""
    adapter = tmp_path / "adapter"
    for folder, inner in ((adapter, place), (checkpoint, part)):
        (folder / inner).mkdir(parents=True, exist_ok=True)
        (folder / "modules.json").write_text(f'[{{"path": "{inner}"}}]')
    (adapter / place / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{checkpoint}"}}')
    before = read_source(str(adapter)).key([])
    (checkpoint / part / "model.safetensors").write_bytes(b"others")

    assert before != read_source(str(adapter)).key([])


def test_the_steps_of_a_training_are_no_part_of_its_checkpoint(checkpoint: Path) -> None:
    """A checkpoint of a training in the same folder does not change the model, and its large files are not read."""
    before = read_source(str(checkpoint)).key([])
    shutil.copytree(checkpoint, checkpoint / "checkpoint-500")

    assert before == read_source(str(checkpoint)).key([])


def test_a_training_without_a_model_of_its_own_names_its_steps(checkpoint: Path) -> None:
    run = checkpoint.parent / "run"
    run.mkdir()
    (run / "trainer_state.json").write_text("{}")
    shutil.copytree(checkpoint, run / "checkpoint-500")
    with pytest.raises(StartError, match=f"--model {run}/checkpoint-500"):
        read_source(str(run))


def test_each_name_and_each_option_has_its_own_export(checkpoint: Path) -> None:
    keys = [
        read_source(str(checkpoint)).key([]),
        read_source(f"b={checkpoint}").key([]),
        read_source(str(checkpoint)).key(["--precision", "fp32"]),
        read_source("org/model").key([]),
        read_source("org/model@v1").key([]),
        read_source("other/model").key([]),
    ]
    assert len(keys) == len(set(keys))


def test_two_starts_at_once_export_once(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    fake("time.sleep(0.3)")
    source = read_source(str(checkpoint))
    # threads stand for processes: a lock is of the open file; the signals of an export are the main thread's
    made: list[Path] = []

    def other() -> None:
        while not calls(tmp_path):
            time.sleep(0.01)
        made.append(sources.obtain(source, [], tmp_path / "cache"))

    thread = threading.Thread(target=other)
    thread.start()
    made.append(sources.obtain(source, [], tmp_path / "cache"))
    thread.join()

    assert made[0] == made[1]
    assert 1 == len(calls(tmp_path))


def test_a_cache_that_cannot_be_written_is_said(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StartError, match="--cache-dir"):
        with_sources(settings(tmp_path, "--model", str(checkpoint)))


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert Path("/elsewhere/bertserve") == sources.cache_folder(Settings())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert Path("/home/ada/.cache/bertserve") == sources.cache_folder(Settings())


# ---- the export


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], "--provider cpu"),
        (["--precision", "fp32"], "--provider cpu --precision fp32"),
        (["--precision", "int8"], "--provider cpu --precision int8"),
        (["--provider", "cuda"], "--provider cuda"),
        (["--provider", "cuda", "--allow-provider-fallback"], "--provider cpu,cuda"),
        (["--provider", "tensorrt", "--precision", "fp16"], "--provider tensorrt --precision fp16"),
        (["--provider", "cuda", "--precision", "fp16", "--allow-provider-fallback"], "--provider cpu,cuda"),
    ],
)
def test_what_is_exported_follows_from_what_is_asked_for(flags: list[str], options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_is_installed", lambda package: False)
    found = export_options(parse(Settings, flags))

    assert options.split() == found
    assert "x" == _parser().parse_args([*found, "--output", "y", "--name", "z", "--revision", "r", "--", "x"]).source


def test_with_the_runtime_of_gpus_there_are_graphs_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--provider auto` then takes CUDA where it is available."""
    monkeypatch.setattr(sources, "_is_installed", lambda package: True)
    assert ["--provider", "cpu,cuda"] == export_options(Settings())
    assert ["--provider", "cuda", "--precision", "fp16"] == export_options(Settings(precision="fp16"))


@pytest.mark.parametrize("flags", [["--precision", "fp16", "--provider", "cpu"], ["--precision", "int8", "--provider", "cuda"]])
def test_a_precision_that_a_provider_lacks_is_wrong_usage(flags: list[str], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--precision is "):
        with_sources(settings(tmp_path, "--model", str(checkpoint), *flags))


def test_the_exports_error_is_the_commands(checkpoint: Path, fake: Fake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake('sys.exit("bert-export: the checkpoint cannot be read.")')
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--port", "0", "--model", str(checkpoint), "--cache-dir", str(tmp_path / "cache")])

    assert 1 == stopped.value.code
    assert "bert-export: the checkpoint cannot be read.\n" == capfd.readouterr().err


def test_what_is_missing_is_said_in_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None if name in ("torch", "transformers") else object())
    flags = ["--model", str(checkpoint), "--cache-dir", str(tmp_path / "cache")]

    assert [1, 1] == [main(["serve", "--port", "0", *flags]), main(["check", *flags])]
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert "torch, transformers " in first and "`export` (`pip install " in first


def test_the_exporter_stands_beside_the_service() -> None:
    assert "bertserve.export.cli" == sources.MODULE


@contextmanager
def starting(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a start that exports with the fake; ends it if it has not ended."""
    code = textwrap.dedent("""
        import sys
        from bertserve.service.cli import main
        from bertserve.service import sources
        sources.export_command = lambda: [sys.executable, sys.argv[1]]
        sys.exit(main(sys.argv[2:]))
    """)
    process = subprocess.Popen([sys.executable, "-c", code, *flags], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("workers", "number"),
    [
        ("1", signal.SIGINT),
        pytest.param("1", signal.SIGTERM, marks=pytest.mark.full_grid),
        pytest.param("2", signal.SIGINT, marks=pytest.mark.full_grid),
        pytest.param("2", signal.SIGTERM, marks=pytest.mark.full_grid),
    ],
)
def test_a_signal_ends_the_export_and_the_start(workers: str, number: signal.Signals, checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    """Both end, with the exit code of the signal; the exporter gets the very signal once, and the cache has no bundle."""
    fake(
        "got = []; signal.signal(signal.SIGINT, lambda n, _: got.append(n)); signal.signal(signal.SIGTERM, lambda n, _: got.append(n))\n"
        'open(output.parent / "ready", "w").close()\n'
        "while not got: time.sleep(0.01)\n"
        'print(*got, file=open(output.parent / "got", "w")); sys.exit(1)'
    )
    flags = ["serve", "--port", "0", "--model", str(checkpoint), "--cache-dir", str(tmp_path / "cache"), "--workers", workers]
    with starting(str(tmp_path / "exporter.py"), *flags) as process:
        while not (tmp_path / "cache/ready").exists():
            time.sleep(0.01)
        os.kill(process.pid, number)

        assert 128 + number == process.wait(10)
    assert f"{number.value}\n" == (tmp_path / "cache/got").read_text()
    assert [] == list((tmp_path / "cache").glob("*/own"))


# ---- folders of models


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert 1 == main(["serve", "--port", "0", *argv])
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_checkpoint_in_the_place_of_models_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With both commands that make something of it, also where it is one of a folder's."""
    assert f"`bert-serve serve --model {checkpoint}`" in said(capsys, "--models", str(checkpoint))
    assert f"`bert-export {checkpoint} --output MODELS_DIR`" in said(capsys, "--models", str(checkpoint.parent))


def test_the_default_folder_may_not_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an install of the wheel, which has no models: one line says what to give."""
    monkeypatch.chdir(tmp_path)
    assert "`models`" in said(capsys)


def test_a_bundle_may_be_given_itself(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the folder that it is in, by any way to write it."""
    monkeypatch.chdir(models / "tiny")
    assert [models / "tiny"] == find_bundles([Path()]) == find_bundles([models / "tiny"])
