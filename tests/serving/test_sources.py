"""`--model SOURCE`: the kinds of sources, the cache of exports, the export in another process, and the errors."""

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

from bertserve.export.cli import build_parser
from bertserve.service import sources
from bertserve.service.bundle.files import find_bundles
from bertserve.service.cli import main
from bertserve.service.command_line import parse
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.settings import Settings
from bertserve.service.sources import ModelSource, export_options, read_source, with_sources
from support import tiny

pytestmark = pytest.mark.usefixtures("logging_of_pytest")

# replaces bert-export: it copies a finished bundle, waits or fails
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
    """Returns `fake(behavior)`, which replaces bert-export with a fast exporter; its bundles have the name `own`."""
    tiny.bundle(tmp_path / "finished", "own")

    def fake(behavior: str = "") -> None:
        script = tmp_path / "exporter.py"
        script.write_text(textwrap.dedent(FAKE).format(behavior=behavior, finished=tmp_path / "finished/own"))
        monkeypatch.setattr(sources, "export_command", lambda source: [sys.executable, str(script)])

    fake()
    return fake


def settings(tmp_path: Path, *flags: str) -> Settings:
    return parse(Settings, ["--cache-dir", str(tmp_path / "cache"), *flags])


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "cache/calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_bundle_is_served_in_place_and_model_and_models_combine(models: Path, checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    tiny.bundle(models, "other")
    alone = with_sources(settings(tmp_path, "--model", str(models / "tiny")))
    both = with_sources(settings(tmp_path, "--model", str(checkpoint), "--models", str(models)))

    assert find_bundles(alone.models) == [models / "tiny"]
    assert [path.name for path in find_bundles(both.models)] == ["other", "own", "tiny"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/model", ModelSource("model", "org/model")),
        ("model", ModelSource("model", "model")),
        ("org/model@v1.0", ModelSource("model", "org/model", "v1.0")),
        ("mine=org/model@main", ModelSource("mine", "org/model", "main")),
        ("=org/model", ModelSource("model", "org/model")),
    ],
)
def test_a_name_without_a_folder_is_a_hub_id(text: str, source: ModelSource) -> None:
    assert read_source(text) == source


def test_a_folder_can_be_served_under_another_name(checkpoint: Path) -> None:
    odd = checkpoint.rename(checkpoint.with_name("a=b"))
    assert read_source(f"mine={odd}") == ModelSource("mine", str(odd))
    with pytest.raises(SettingsError, match="`a=b`"):
        read_source(str(odd))


def test_a_source_that_is_not_a_model_is_refused_with_the_reason(models: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them are a folder of bundles, a bundle under another name, and the folder of a training."""
    run = checkpoint.parent / "run"
    run.mkdir()
    (run / "trainer_state.json").write_text("{}")
    shutil.copytree(checkpoint, run / "checkpoint-500")
    nothing = ("./none", "/none", "~/none-such", "a/b/c", "x=./none", "", "x=", "/", "x" * 300)
    monkeypatch.chdir(checkpoint)  # an empty source is not the working directory
    reasons = {
        str(models): f"--model {models / 'tiny'}, or give .* --models {models}",
        f"other={models}/tiny": "`tiny`",
        str(run): f"--model {run / 'checkpoint-500'}",
        "bad name=org/model": "give NAME=SOURCE",
        "org/mo del": "give NAME=SOURCE",
    }
    for text, reason in (reasons | dict.fromkeys(nothing, ".")).items():
        with pytest.raises((SettingsError, StartError), match=reason):
            read_source(text)


def test_two_sources_with_the_same_name_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(checkpoint, tmp_path / "elsewhere/own")
    with pytest.raises(SettingsError, match=f"`own` twice, .* NAME={twin}"):
        with_sources(settings(tmp_path, "--model", str(checkpoint), "--model", str(twin)))


def test_the_second_start_uses_the_cached_bundle(checkpoint: Path, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = with_sources(settings(tmp_path, "--model", str(checkpoint)))
    monkeypatch.setattr(sources, "export_command", lambda source: pytest.fail("nothing is to be exported"))

    assert with_sources(settings(tmp_path, "--model", str(checkpoint))).models == first.models
    assert len(calls(tmp_path)) == 1


def test_a_bundle_without_int8_is_served_with_a_warning(
    checkpoint: Path, fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bert-export exits with 4 if int8 failed and fp32 succeeded. The next start uses the same bundle."""
    fake("import atexit, os; atexit.register(os._exit, 4)")
    flags = ("--model", str(checkpoint))
    first = with_sources(settings(tmp_path, *flags))

    assert str(checkpoint) in caplog.text
    assert [path.name for path in find_bundles(first.models)] == ["own"]
    assert with_sources(settings(tmp_path, *flags)).models == first.models
    assert len(calls(tmp_path)) == 1


def test_a_changed_checkpoint_is_exported_again(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    (checkpoint / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (checkpoint / "1_Pooling").mkdir()
    weights = ("model.safetensors", "pytorch_model-00001-of-00002.bin", "adapter_model.safetensors", "adapter_model.bin")
    parts = (*weights, "config.json", "tokenizer.json", "vocab.txt", "spiece.model", "README.md", "1_Pooling/config.json")
    for number, part in enumerate(("model.safetensors", *parts), start=1):
        (checkpoint / part).write_bytes(b"{ }" + b" " * number)
        with_sources(settings(tmp_path, "--model", str(checkpoint)))
        assert len(calls(tmp_path)) == number, part


@pytest.mark.parametrize(("place", "part"), [("", ""), ("0_Transformer", ""), ("", "0_Transformer")])
def test_the_cache_key_of_an_adapter_depends_on_its_base_model(place: str, part: str, checkpoint: Path, tmp_path: Path) -> None:
    """New weights of the base model change the key, also if the adapter or the base model is in a subfolder."""
    adapter = tmp_path / "adapter"
    for folder, inner in ((adapter, place), (checkpoint, part)):
        (folder / inner).mkdir(parents=True, exist_ok=True)
        (folder / "modules.json").write_text(f'[{{"path": "{inner}"}}]')
    (adapter / place / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{checkpoint}"}}')
    before = read_source(str(adapter)).key([])
    (checkpoint / part / "model.safetensors").write_bytes(b"others")

    assert before != read_source(str(adapter)).key([])


def test_each_source_name_and_option_has_its_own_cache_key(checkpoint: Path) -> None:
    """A training's intermediate checkpoints do not change it: they are not part of the model, and their large files are not read."""
    keys = [
        read_source(str(checkpoint)).key([]),
        read_source(f"b={checkpoint}").key([]),
        read_source(str(checkpoint)).key(["--precision", "fp32"]),
        read_source("org/model").key([]),
        read_source("org/model@v1").key([]),
        read_source("other/model").key([]),
    ]
    assert len(set(keys)) == len(keys)
    shutil.copytree(checkpoint, checkpoint / "checkpoint-500")
    assert read_source(str(checkpoint)).key([]) == keys[0]


def test_two_simultaneous_starts_export_once(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    fake("time.sleep(0.3)")
    source = read_source(str(checkpoint))
    # threads can replace processes, because the lock belongs to an open file; only the main thread handles an export's signals
    exports: list[Path] = []

    def other() -> None:
        while not calls(tmp_path):
            time.sleep(0.01)
        exports.append(sources.get_or_export(source, [], tmp_path / "cache"))

    thread = threading.Thread(target=other)
    thread.start()
    exports.append(sources.get_or_export(source, [], tmp_path / "cache"))
    thread.join()

    assert exports[1] == exports[0]
    assert len(calls(tmp_path)) == 1


def test_an_unwritable_cache_is_an_error(checkpoint: Path, fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StartError, match="--cache-dir"):
        with_sources(settings(tmp_path, "--model", str(checkpoint)))


def test_the_default_cache_is_in_the_cache_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert sources.cache_folder(Settings()) == Path("/elsewhere/bertserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert sources.cache_folder(Settings()) == Path("/home/ada/.cache/bertserve")


@pytest.mark.parametrize(
    ("flags", "options", "gpu"),
    [
        ("", "--provider cpu", False),
        ("", "--provider cpu,cuda", True),
        ("--precision fp32", "--provider cpu --precision fp32", False),
        ("--precision int8", "--provider cpu --precision int8", False),
        ("--precision fp16", "--provider cuda --precision fp16", True),
        ("--provider cuda", "--provider cuda", False),
        ("--provider cuda --allow-provider-fallback", "--provider cpu,cuda", False),
        ("--provider tensorrt --precision fp16", "--provider tensorrt --precision fp16", False),
        ("--provider cuda --precision fp16 --allow-provider-fallback", "--provider cpu,cuda", False),
    ],
)
def test_the_export_options_follow_from_the_settings(flags: str, options: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a runtime for GPUs, `--provider auto` uses CUDA if it is available."""
    monkeypatch.setattr(sources, "distributions", lambda name: [name] if gpu else [])
    arguments = export_options(parse(Settings, flags.split()))

    assert arguments == options.split()
    assert build_parser().parse_args([*arguments, "--output", "y", "--name", "z", "--revision", "r", "--", "x"]).source == "x"


@pytest.mark.parametrize("flags", [["--precision", "fp16", "--provider", "cpu"], ["--precision", "int8", "--provider", "cuda"]])
def test_a_precision_that_the_provider_lacks_is_a_usage_error(flags: list[str], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--precision is "):
        with_sources(settings(tmp_path, "--model", str(checkpoint), *flags))


def test_the_command_prints_the_export_error(checkpoint: Path, fake: Fake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake('sys.exit("bert-export: the checkpoint cannot be read.")')
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--port", "0", "--model", str(checkpoint), "--cache-dir", str(tmp_path / "cache")])

    assert exit_info.value.code == 1
    assert capfd.readouterr().err == "bert-export: the checkpoint cannot be read.\n"


def test_one_line_names_the_missing_packages(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None if name in ("torch", "transformers") else object())
    flags = ["--model", str(checkpoint), "--cache-dir", str(tmp_path / "cache")]

    assert [main(["serve", "--port", "0", *flags]), main(["check", *flags])] == [1, 1]
    first, second = capsys.readouterr().err.splitlines()
    assert second == first
    assert "torch, transformers" in first
    assert "`export` (`pip install " in first


@contextmanager
def starting(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Yields the process of a start that exports with the fake, and kills it at the end."""
    code = textwrap.dedent("""
        import sys
        from bertserve.service.cli import main
        from bertserve.service import sources
        sources.export_command = lambda source: [sys.executable, sys.argv[1]]
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

        assert process.wait(10) == 128 + number
    assert (tmp_path / "cache/got").read_text() == f"{number.value}\n"
    assert list((tmp_path / "cache").glob("*/own")) == []


def listing_of(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["serve", "--port", "0", *argv]) == 1
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_the_error_for_a_checkpoint_in_models_shows_what_to_do(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"`bert-serve serve --model {checkpoint}`" in listing_of(capsys, "--models", str(checkpoint))
    assert f"`bert-export {checkpoint} --output MODELS_DIR`" in listing_of(capsys, "--models", str(checkpoint.parent))


def test_a_missing_folder_is_named_before_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"`nope`.*torch"):
        with_sources(settings(tmp_path, "--model", "nope"))
