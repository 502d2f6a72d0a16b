"""Hostile and half-written checkpoints, full disks and signals: one line, the right exit code, nothing left."""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tiny
from bertserve.export import cli, workspace
from bertserve.export.workspace import LOCK_FILE
from bertserve.service.bundle.files import load_bundle
from checkpoints import edit_json, edit_weights, few_texts
from full_disk import largest_file
from outputs import FAST, Run, contents, left_in
from playback import play_back

pytestmark = pytest.mark.torch
pytest_plugins = ("command",)


class Trap:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


# ---- checkpoints


def shards(path: Path, name: str) -> None:
    """Cuts the weights into one file of this name, with an index."""
    names = list(load_file(path / "model.safetensors"))
    (path / "model.safetensors").rename(path / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def truncate(path: Path) -> None:
    """Cuts the weights off in the middle, as an interrupted copy does."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def declare_code(path: Path) -> None:
    """Makes configuration and tokenizer ask for code that lies beside them."""
    (path / "code.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n", encoding="utf-8")
    edit_json(path / "config.json", model_type="zorp", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})


def slow_tokenizer(path: Path) -> None:
    """Leaves a tokenizer that transformers has in Python alone."""
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}), encoding="utf-8")


def gap_in_the_vocabulary(path: Path) -> None:
    """Gives the last token an id beyond the embedding, where the number of tokens would fit."""
    document = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 5000
    (path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")


def adapter(path: Path) -> None:
    """Adds weights that the architecture does not know, as from a library of adapters."""
    edit_weights(path, lambda t: t.update({"bert.encoder.layer.0.adapter.down.weight": t["classifier.weight"].clone()}))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        pytest.param(lambda path: (path / "config.json").write_text("[]"), ["configuration"], id="configuration is a list"),
        pytest.param(lambda path: (path / "config.json").write_bytes(b"\xff\xfe"), ["configuration"], id="configuration is no text"),
        pytest.param(
            lambda path: edit_json(path / "config.json", hidden_size="large"), ["cannot be read"], id="configuration of a wrong type"
        ),
        pytest.param(
            lambda path: edit_json(path / "config.json", num_hidden_layers=1),
            ["more layers", "layer.1", "num_hidden_layers"],
            id="fewer layers than the weights have",
        ),
        pytest.param(
            lambda path: edit_json(path / "config.json", vocab_size=500),
            ["word_embeddings.weight` is [1100, 32], but configured is [500, 32]", "vocab_size"],
            id="another vocabulary than the weights",
        ),
        pytest.param(
            lambda path: edit_json(path / "config.json", id2label={"0": "a", "1": "", "2": "b"}), ["labels", "distinct"], id="empty label"
        ),
        pytest.param(adapter, ["1 weights that its architecture does not use", "adapter.down"], id="weights of an adapter"),
        pytest.param(truncate, ["weights", "download it again"], id="weights cut off"),
        pytest.param(slow_tokenizer, ["no fast tokenizer", "tokenizer.json"], id="slow tokenizer only", marks=pytest.mark.full_grid),
        pytest.param(gap_in_the_vocabulary, ["5001 tokens", "1100 rows"], id="token id beyond the embedding"),
        pytest.param(declare_code, ["custom code", "never run"], id="code of its own"),
        pytest.param(lambda path: shards(path, "pytorch_model.bin"), ["pytorch_model.bin", "Pickled"], id="index of pickles"),
        pytest.param(lambda path: shards(path, "weights.safetensors.bin"), ["weights.safetensors.bin"], id="index of another format"),
        pytest.param(lambda path: (path / "model.safetensors.index.json").write_text("[]"), ["index"], id="index is a list"),
    ],
)
def test_a_checkpoint_that_cannot_be_trusted_is_refused_in_one_line(
    source: Path, output: Path, run: Run, change: Callable[[Path], object], facts: list[str]
) -> None:
    """Exit code 1, a line that names what is wrong, and nothing left in the output folder."""
    change(source)
    code, message = run(source, *FAST)

    assert 1 == code
    assert [] == [fact for fact in facts if fact not in message]
    assert [] == left_in(output)
    assert not (source / "ran").exists()


def test_a_pickle_beside_the_weights_is_never_opened(source: Path, output: Path, tmp_path: Path, run: Run) -> None:
    """The export goes by the safetensors, and no file that could run code does."""
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "model.pkl", "optimizer.pt"):
        (source / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))

    assert 0 == run(source, *FAST)[0]
    assert ["tiny-bert"] == left_in(output)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_that_an_index_names_is_never_opened(source: Path, tmp_path: Path, run: Run) -> None:
    """Also where the index of safetensors is what names it."""
    shards(source, "pytorch_model.bin")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))

    assert 1 == run(source, *FAST)[0]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.full_grid
def test_weights_in_parts_are_exported(source: Path, output: Path, run: Run) -> None:
    """An index of safetensors is what large checkpoints have."""
    shards(source, "model-00001-of-00001.safetensors")

    assert 0 == run(source, *FAST)[0]
    assert ["tiny-bert"] == left_in(output)


def test_code_that_is_not_needed_is_not_run(source: Path, run: Run) -> None:
    """A known architecture is exported with the classes of transformers, whatever code its configuration offers."""
    declare_code(source)
    edit_json(source / "config.json", model_type="bert")

    assert 0 == run(source, *FAST)[0]
    assert not (source / "ran").exists()


@pytest.mark.full_grid
def test_leftovers_of_the_pretraining_do_not_matter(source: Path, output: Path, run: Run) -> None:
    """Other heads and stored position ids are left, as transformers leaves them."""
    extra = {"cls.predictions.bias": "classifier.bias", "cls.seq_relationship.weight": "classifier.weight"}
    edit_weights(source, lambda tensors: tensors.update({name: tensors[like].clone() for name, like in extra.items()}))

    assert 0 == run(source, *FAST)[0]
    assert ["tiny-bert"] == left_in(output)


# ---- the output


@pytest.mark.usefixtures("played_back")
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "dangling link"])
def test_overwrite_replaces_whatever_has_the_name(source: Path, output: Path, tmp_path: Path, run: Run, kind: str) -> None:
    """Exit code 0, the bundle in place, nothing beside it; what a link points to is left alone."""
    output.mkdir()
    target, elsewhere = output / "tiny-bert", tmp_path / "elsewhere"
    if kind == "file":
        target.write_text("plain")
    else:
        if kind == "link to a file":
            elsewhere.write_text("plain")
        elif kind == "link to a folder":
            (elsewhere / "inside").mkdir(parents=True)
        target.symlink_to(elsewhere)

    assert (2, True) == ((found := run(source, *FAST))[0], "--overwrite" in found[1])
    assert 0 == run(source, *FAST, "--overwrite")[0]
    assert ["tiny-bert"] == left_in(output)
    assert "tiny-bert" == load_bundle(target).manifest.name
    assert ("dangling" not in kind and kind != "file") is elsewhere.exists()
    assert (kind == "link to a folder") is (elsewhere / "inside").exists()


@pytest.mark.usefixtures("played_back")
def test_an_old_bundle_that_cannot_be_removed_does_not_fail_the_export(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new bundle is in place, which is what was asked for."""
    tiny.bundle(output, "tiny-bert")
    remove = __import__("shutil").rmtree

    def busy(path: Path, **options: Any) -> None:
        if Path(path).name == ".tiny-bert.old" and Path(path).exists():
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        remove(path, **options)

    monkeypatch.setattr("bertserve.export.bundle.shutil.rmtree", busy)

    assert 0 == run(source, *FAST, "--overwrite")[0]
    assert "tiny-bert" == load_bundle(output / "tiny-bert").manifest.source.checkpoint


# ---- no space


SIZES = [1_000, 20_000, 100_000, 180_000]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_cannot_be_written_ends_in_one_line(
    source: Path, output: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Wherever the writing stops: exit code 1, the folder named, the old bundle as it was, nothing beside it; once with every stage real."""
    existing = contents(tiny.bundle(output, "tiny-bert"))
    texts = str(few_texts(tmp_path))
    if size != SIZES[-1]:
        play_back(monkeypatch, source)
    with largest_file(size):
        code, message = run(source, "--overwrite", "--calibration", texts)

    assert 1 == code
    assert "cannot write the bundle: File too large" in message
    assert str(output) in message
    assert existing == contents(output / "tiny-bert")
    assert ["tiny-bert"] == left_in(output)


@pytest.mark.parametrize(
    "stage",
    [
        "trace.trace",
        "cpu.fuse",
        "graph.cpu_passes.unfuse",
        "graph.cpu_passes.restrict_to_cls",
        "graph.cpu_passes.pack_qkv",
        "int8.quantize.quantize",
        "bundle.model_card",
    ],
)
def test_a_full_disk_in_any_stage_leaves_nothing(
    source: Path, output: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A failed write knows no file name; the output folder is named instead, with what to do; once with every stage before it real."""
    if stage != "bundle.model_card":
        play_back(monkeypatch, source)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"bertserve.export.{stage}", full)
    code, message = run(source, "--calibration", str(few_texts(tmp_path)))

    assert (1, []) == (code, left_in(output))
    assert f"No space left on device (`{output}`); free disk space, or give another --output" in message


# ---- signals

# Processes of their own, from one that has imported torch once: each would need seconds for that.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["checkpoints", "bertserve.export.pipeline"])


class Hanging:
    """An overwriting export, in a process of its own, that stays in a stage."""

    def __init__(self, source: Path, output: Path, stage: str) -> None:
        self.log = output.with_name("log")
        self._ready, ready = PROCESSES.Pipe(duplex=False)
        arguments = [str(source), "--output", str(output), "--overwrite", "--tracer", "torchscript", *FAST]
        self.process = PROCESSES.Process(target=hang, args=(arguments, stage, self.log, ready))
        self.process.start()
        ready.close()
        assert "hanging" == self._ready.recv()

    def ended_by(self, number: int) -> tuple[int | None, str]:
        """Sends a signal; returns the exit code, and what was written to stderr."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(60)
        self._ready.close()
        return self.process.exitcode, self.log.read_text()


def hang(arguments: list[str], stage: str, log: Path, ready: Connection) -> None:
    """Runs the command with a stage that says when it begins and does not end; its stderr goes to a file."""
    errors = log.open("w")
    os.dup2(errors.fileno(), sys.stderr.fileno())
    module, _, function = stage.rpartition(".")

    def stay(*_: Any, **__: Any) -> None:
        ready.send("hanging")
        while True:
            time.sleep(0.01)

    setattr(importlib.import_module(f"bertserve.export.{module}"), function, stay)
    sys.exit(cli.main(arguments))


@pytest.mark.full_grid
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("cpu.fuse", signal.SIGINT),
        ("cpu.fuse", signal.SIGTERM),
        ("bundle.model_card", signal.SIGTERM),
    ],
)
def test_a_signal_stops_a_running_export(source: Path, output: Path, stage: str, number: signal.Signals) -> None:
    """In a process of its own: the shell's exit code, one line and no traceback, no temporary folder, the old bundle untouched."""
    existing = contents(tiny.bundle(output, "tiny-bert"))
    export = Hanging(source, output, stage)
    assert 2 == len(left_in(output))  # the bundle, and the hidden folder of the work

    code, errors = export.ended_by(number)
    assert 128 + number == code
    own = [line for line in errors.splitlines() if line.startswith("bert-export: ")]
    assert [f"bert-export: stopped by {number.name}; no partial files are left."] == own
    assert "Traceback" not in errors
    assert existing == contents(output / "tiny-bert")
    assert ["tiny-bert"] == left_in(output)


def test_a_second_export_of_a_name_fails_at_once(source: Path, output: Path, run: Run) -> None:
    """While the first one runs, with --overwrite too: before it loads anything, and without a trace. Another name is no matter."""
    others = (".tiny-bert.12345678", ".tiny-bert.extra.12345678", ".git")
    for name in others:
        (output / name).mkdir(parents=True)
    export = Hanging(source, output, "cpu.fuse")
    before = left_in(output)
    refused = [run(source, *FAST, *flags) for flags in ((), ("--overwrite",))]
    missing = run(source.with_name("missing"), *FAST, "--name", "tiny-bert")
    alive = left_in(output)
    assert 0 == run(source, *FAST, "--name", "other")[0]
    export.ended_by(signal.SIGKILL)
    killed = left_in(output)
    assert 0 == run(source, *FAST)[0]

    assert [2, 2, 2] == [code for code, _ in (*refused, missing)]
    assert all(f"`{output / 'tiny-bert'}` is running (process {export.process.pid})" in message for _, message in (*refused, missing))
    assert sorted([".tiny-bert.export", *others]) == before == alive
    assert sorted([*before, "other"]) == killed
    assert sorted([*others, "other", "tiny-bert"]) == left_in(output)


@pytest.mark.usefixtures("played_back")
def test_a_bundle_that_appears_during_an_export_stays(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --overwrite nothing is replaced, whoever made it."""
    from bertserve.export import pipeline

    answers = pipeline.measure_graphs

    def meanwhile(*args: Any, **options: Any) -> Any:
        tiny.bundle(output, "tiny-bert")
        return answers(*args, **options)

    monkeypatch.setattr(pipeline, "measure_graphs", meanwhile)
    assert 2 == run(source, *FAST)[0]
    assert ["tiny-bert"] == left_in(output)
    assert "tiny" == load_bundle(output / "tiny-bert").manifest.source.checkpoint


@pytest.mark.usefixtures("played_back")
def test_an_export_that_cannot_lock_its_folder_is_left_alone(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks an export works, and nobody takes its folder for a dead one's."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("bertserve.export.workspace.fcntl.flock", none)
    folder = output / ".tiny-bert.12345678"
    (folder / "work").mkdir(parents=True)
    (folder / LOCK_FILE).write_text("1\n", encoding="ascii")

    assert 0 == run(source, *FAST)[0]
    assert [folder.name, "tiny-bert"] == left_in(output)


@pytest.mark.usefixtures("played_back")
def test_signals_are_held_off_while_the_bundles_change_places(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal between the two renames does not leave the name without a bundle; the export ends as if it had come later."""
    tiny.bundle(output, "tiny-bert")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        os.kill(os.getpid(), signal.SIGTERM)
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)

    assert 0 == run(source, *FAST, "--overwrite")[0]
    assert ["tiny-bert"] == left_in(output)
    assert "tiny-bert" == load_bundle(output / "tiny-bert").manifest.source.checkpoint


def test_handlers_are_put_back() -> None:
    """What the caller had is there again, also after a signal."""
    before = [signal.getsignal(number) for number in workspace.STOP_SIGNALS]
    with pytest.raises(workspace.Stopped) as stopped, workspace.raise_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)  # runs the handlers of what it has sent to itself

    assert (143, "SIGTERM") == (stopped.value.exit_code, stopped.value.signal.name)
    assert before == [signal.getsignal(number) for number in workspace.STOP_SIGNALS]


def test_outside_of_the_main_thread_nothing_changes() -> None:
    """Python handles signals in the main thread alone."""
    seen: list[object] = []

    def work() -> None:
        with workspace.raise_on_signals(), workspace.ignore_signals():
            seen.append([signal.getsignal(number) for number in workspace.STOP_SIGNALS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [[signal.getsignal(number) for number in workspace.STOP_SIGNALS]] == seen
