"""Invalid checkpoints, full disks and signals: the export prints one line, returns the right exit code and leaves no files."""

import errno
import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from bertserve.export import cli, onnx_trace
from bertserve.export.workspace import LOCK_FILE
from bertserve.service.bundle.files import load_bundle
from support import tiny
from support.bundles import FAST, Run, assert_exit, contents, largest_file, left_in
from support.checkpoints import VOCABULARY, bert, edit_json, edit_weights, pickle_weights, rename_weights

pytestmark = pytest.mark.torch

Change = Callable[[Path], object]  # changes a checkpoint in place


def remove(*names: str) -> Change:
    return lambda path: [(path / name).unlink() for name in names]


def write(name: str, content: bytes) -> Change:
    return lambda path: (path / name).write_bytes(content)


def configure(**changes: Any) -> Change:
    return lambda path: edit_json(path / "config.json", **changes)


def weigh(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda path: edit_weights(path, edit)


def replace(**options: Any) -> Change:
    """Returns a change that replaces a classifier with another checkpoint that claims to be a classifier."""

    def change(path: Path) -> None:
        shutil.rmtree(path)
        bert(path.parent, path.name, **options)
        edit_json(path / "config.json", architectures=["BertForSequenceClassification"])

    return change


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def drop_pad_token(path: Path) -> None:
    """Removes the padding token and all unused special tokens from tokenizer and configuration."""
    edit_json(path / "config.json", pad_token_id=None)
    edit_json(path / "tokenizer.json", padding=None)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]"}))


def pad_by(token: str) -> Change:
    def change(path: Path) -> None:
        edit_json(path / "tokenizer_config.json", pad_token=token)
        edit_json(path / "config.json", pad_token_id=tiny.VOCABULARY.index(token))

    return change


def truncate(file: Path) -> None:
    """Truncates a file in the middle, like an interrupted copy."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def declare_code(path: Path) -> None:
    """Makes the configuration require code from the checkpoint's folder."""
    (path / "code.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n", encoding="utf-8")
    edit_json(path / "config.json", model_type="zorp", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})


def declare_head(path: Path) -> None:
    """Makes the configuration of a known architecture require code for the class of its task."""
    declare_code(path)
    edit_json(path / "config.json", model_type="bert", auto_map={"AutoModelForSequenceClassification": "code.Model"})


def slow_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}), encoding="utf-8")


def change_model(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Returns a change of the model in `tokenizer.json`, which the library's generic class reads without changes."""

    def change(path: Path) -> None:
        edit_json(path / "tokenizer.json", model=edit(json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]))
        edit_json(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")

    return change


DENSE = "bert.encoder.layer.1.output.dense.weight"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"
BAD: dict[str, tuple[Change, list[str]]] = {
    "no configuration": (remove("config.json"), ["`config.json`"]),
    "broken configuration": (write("config.json", b"{"), ["config", "JSON"]),
    "unknown model type": (configure(model_type="zorp"), ["`zorp`"]),
    "code of its own": (declare_code, ["`auto_map`"]),
    "code of its own for a known architecture": (declare_head, ["`auto_map`", "AutoModelForSequenceClassification"]),
    "unknown activation": (configure(hidden_act="zorp"), ["zorp"]),
    "no architecture": (configure(architectures=None), ["--task"]),
    "architecture without a task": (
        configure(architectures=["BertForNextSentencePrediction"]),
        ["BertForNextSentencePrediction", "--task"],
    ),
    "pickled module": (
        lambda path: pickle_weights(path, lambda tensors: torch.nn.Linear(2, 2)),
        ["pytorch_model.bin", "torch.nn.modules.linear.Linear"],
    ),
    "pickled state of a training": (
        lambda path: pickle_weights(path, lambda tensors: {"epoch": 3, "state_dict": tensors}),
        ["'epoch', 'state_dict'"],
    ),
    "pickled weights cut off": (lambda path: (pickle_weights(path), truncate(path / "pytorch_model.bin")), ["damaged"]),
    "pickled weights not fetched from git lfs": (
        lambda path: (remove("model.safetensors")(path), write("pytorch_model.bin", LFS_POINTER)(path)),
        ["placeholder"],
    ),
    "TensorFlow weights": (lambda path: (path / "model.safetensors").rename(path / "tf_model.h5"), ["model.safetensors", "from_tf"]),
    "index of pickles": (lambda path: rename_weights(path, "pytorch_model.bin"), ["pytorch_model.bin", ".safetensors"]),
    "index is a list": (lambda path: (remove("model.safetensors")(path), write("model.safetensors.index.json", b"[]")(path)), ["index"]),
    "weights cut off": (lambda path: truncate(path / "model.safetensors"), ["weights", "download"]),
    "weights of another file": (configure(transformers_weights="other.safetensors"), ["transformers_weights"]),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), ["tokenizer"]),
    "tokenizer that splits special tokens": (
        lambda path: edit_json(path / "tokenizer_config.json", split_special_tokens=True),
        ["`split_special_tokens`"],
    ),
    "slow tokenizer only": (slow_tokenizer, ["fast tokenizer", "`tokenizer.json`"]),
    "broken tokenizer": (write("tokenizer.json", b"{"), ["tokenizer"]),
    "tokenizer that cannot encode unknown words": (
        change_model(lambda model: model | {"unk_token": "[NONE]"}),
        ["tokenizer", "cannot encode"],
    ),
    "tokenizer that drops unknown letters": (
        change_model(
            lambda model: {"type": "BPE", "vocab": {token: id_ for token, id_ in model["vocab"].items() if token != "?"}, "merges": []}
        ),
        ["tokenizer", "not supported"],
    ),
    "no padding token": (drop_pad_token, ["`pad_token`"]),
    "padding by a word": (pad_by("the"), [f"`the` (id {tiny.VOCABULARY.index('the')})"]),
    "input that nothing fills": (
        lambda path: edit_json(path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask", "bbox"]),
        ["tokenizer", " bbox."],
    ),
    "too few positions": (replace(positions=8), ["8 tokens", "needs 16", "max_position_embeddings"]),
    "NaN weights": (weigh(lambda tensors: tensors[DENSE][:1, :1].fill_(float("nan"))), [f"`{DENSE}`", "NaN"]),
    "weights that overflow": (weigh(lambda tensors: tensors[DENSE].fill_(3e38)), ["finite"]),
    "tokenizer larger than the embedding": (replace(rows=40), [f"{len(VOCABULARY)} tokens", "40 rows"]),
    "token id beyond the embedding": (
        change_model(lambda model: model | {"vocab": model["vocab"] | {"film": 5000}}),
        ["5001 tokens", "1100 rows"],
    ),
    "another vocabulary than the weights": (configure(vocab_size=500), ["[1100, 32]", "[500, 32]", "vocab_size"]),
    "label that is a list": (configure(id2label={"0": "a", "1": ["b"], "2": "c"}), ["labels", "distinct"]),
    "label that is a number and a text": (configure(id2label={"0": 1, "1": "1", "2": "b"}), ["labels", "distinct"]),
    "gap in the labels": (configure(id2label={"0": "a", "1": "b", "7": "c"}), ["labels", "ids 0 to 2"]),
    "encoder without a head": (replace(architecture="BertModel"), ["lacks weights", "classifier"]),
    "more layers than configured": (configure(num_hidden_layers=1), ["more layers", "layer.1", "num_hidden_layers"]),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full_grid if "slow" in kind else ()) for kind in BAD])
def test_a_checkpoint_that_cannot_be_exported_is_refused_in_one_line(source: Path, output: Path, run: Run, kind: str) -> None:
    change, facts = BAD[kind]
    change(source)

    assert_exit(1, run(source, *FAST), *facts)
    assert left_in(output) == []
    assert not (source / "ran").exists()


def test_calibration_texts_that_cannot_be_read_are_wrong_usage(source: Path, tmp_path: Path, run: Run) -> None:
    assert_exit(2, run(source, "--int8-texts", tmp_path / "missing.txt"), "missing.txt")


def test_a_padding_token_is_refused_if_it_is_in_a_pair(source: Path, tmp_path: Path, run: Run) -> None:
    pad_by("the")(source)
    lines = [json.dumps({"text": str(i), "text_pair": "the"}) for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    assert_exit(1, run(source, *FAST, "--int8-texts", tmp_path / "pairs.jsonl"), "such as `the`")


@pytest.mark.parametrize("place", ["with the weights", "without weights", "named by an index"])
def test_code_of_a_pickle_is_never_run(source: Path, output: Path, tmp_path: Path, run: Run, place: str) -> None:
    if place == "without weights":
        (source / "model.safetensors").unlink()
    elif place == "named by an index":
        rename_weights(source, "pytorch_model.bin")
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "model.pkl", "optimizer.pt"):
        (source / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))

    assert run(source, *FAST)[0] == (place != "with the weights")
    assert left_in(output) == ([] if place != "with the weights" else ["tiny-bert"])
    assert not (tmp_path / "sprung").exists()


def test_code_that_is_not_needed_is_not_run(source: Path, run: Run) -> None:
    """A known architecture is exported with the classes of transformers if the configuration has code only for other classes."""
    declare_code(source)
    edit_json(source / "config.json", model_type="bert")

    assert run(source, *FAST)[0] == 0
    assert not (source / "ran").exists()


def test_a_bundle_is_refused_as_a_source(tmp_path: Path, run: Run) -> None:
    bundle = tiny.bundle(tmp_path)
    assert_exit(1, run(bundle), f"bert-serve serve --model {bundle}`")


@pytest.mark.parametrize("where", ["./nowhere", "a/b/c"])
def test_a_missing_folder_is_named(where: str, run: Run) -> None:
    code, message = run(where)

    assert code == 1, message
    assert f"`{where}`" in message
    assert "network" not in message


def test_a_revision_of_a_folder_is_refused(source: Path, run: Run) -> None:
    assert_exit(1, run(source, "--revision", "v1"), "--revision v1")


def test_a_hub_id_without_network_is_refused(output: Path, run: Run) -> None:
    assert_exit(1, run("org/model"), "`org/model`", "network")
    assert not output.exists()


@pytest.mark.parametrize(("error", "status", "cached"), [(GatedRepoError, 403, False), (RepositoryNotFoundError, 401, True)])
def test_a_missing_hub_token_is_explained(run: Run, monkeypatch: pytest.MonkeyPatch, error: Any, status: int, cached: bool) -> None:
    """A private repository looks like one that does not exist; without cached files, the reason is the cause of another error."""

    def download(*_: Any, **__: Any) -> None:
        reason = error("Client Error.", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))
        if cached:
            raise reason
        raise LocalEntryNotFoundError("not in the cache") from reason

    monkeypatch.setattr("bertserve.export.checkpoint.source.snapshot_download", download)
    assert_exit(1, run("org/model", *FAST), f"({error.__name__})", "HF_TOKEN", "hf auth login")


def test_a_task_that_does_not_fit_the_checkpoint_is_refused(source: Path, output: Path, run: Run) -> None:
    facts = ("BertForSequenceClassification", "text-classification", "--task token-classification")
    assert_exit(1, run(source, "--task", "token-classification"), *facts)
    assert not output.exists()


def test_a_source_with_an_invalid_bundle_name_is_refused_early(tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([str(bert(tmp_path, "my checkpoint")), "--output", str(output), *FAST])

    err = capsys.readouterr().err
    assert (code, left_in(output)) == (1, [])
    assert "--name" in err
    assert "trace" not in err


def test_an_output_that_is_a_file_is_refused(source: Path, output: Path, run: Run) -> None:
    output.write_text("not a folder")
    assert_exit(1, run(source, *FAST), str(output))


@pytest.mark.parametrize("size", [1_000, 180_000])
def test_an_export_that_cannot_write_a_file_fails_with_one_line(source: Path, output: Path, run: Run, size: int) -> None:
    existing = contents(tiny.bundle(output, "tiny-bert"))
    with largest_file(size):
        result = run(source, "--overwrite")

    assert_exit(1, result, os.strerror(errno.EFBIG), str(output))
    assert contents(output / "tiny-bert") == existing
    assert left_in(output) == ["tiny-bert"]


@pytest.mark.parametrize(("number", "stage"), [(signal.SIGINT, "onnx_trace.trace"), (signal.SIGTERM, "pipeline.bundle_texts")])
def test_an_export_that_a_signal_stops_leaves_no_files(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, stage: str
) -> None:
    monkeypatch.setattr(f"bertserve.export.{stage}", lambda *_: os.kill(os.getpid(), number))
    for flags in ((), ("--overwrite",)):
        existing = contents(tiny.bundle(output, "tiny-bert")) if flags else {}
        assert_exit(128 + number, run(source, *flags), number.name)
        assert left_in(output) == (["tiny-bert"] if flags else [])
        assert not flags or existing == contents(output / "tiny-bert")


def test_a_second_export_of_a_name_fails_at_once(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, end = threading.Event(), threading.Event()
    trace = onnx_trace.trace

    def wait_once(*args: Any, **options: Any) -> Any:
        if start.is_set():
            return trace(*args, **options)
        start.set()
        assert end.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(onnx_trace, "trace", wait_once)
    others = (".tiny-bert.12345678", ".tiny-bert.extra.12345678", ".git")
    for name in others:
        (output / name).mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cli.main, [str(source), "--output", str(output), "--overwrite", *FAST])
        assert start.wait(60)
        results = [run(source, *FAST), run(source, *FAST, "--overwrite"), run(source.with_name("missing"), *FAST, "--name", "tiny-bert")]
        assert run(source, *FAST, "--name", "other")[0] == 0
        end.set()
    (output / ".tiny-bert.export" / "work").mkdir(parents=True)  # the folder of an export that was killed
    assert first.result() == 1
    assert f"{os.strerror(errno.ENOSPC)} (`{output}`)" in capsys.readouterr().err
    assert run(source, *FAST)[0] == 0

    assert [code for code, _ in results] == [2, 2, 2]
    assert all(f"`{output / 'tiny-bert'}` is running (process {os.getpid()})" in message for _, message in results)
    assert left_in(output) == sorted([*others, "other", "tiny-bert"])


def test_without_locks_the_folder_of_another_export_is_kept(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("bertserve.export.workspace.fcntl.flock", none)
    folder = output / ".tiny-bert.12345678"
    (folder / "work").mkdir(parents=True)
    (folder / LOCK_FILE).write_text("1\n", encoding="ascii")

    assert run(source, *FAST)[0] == 0
    assert left_in(output) == [folder.name, "tiny-bert"]


def test_a_link_in_place_of_the_hidden_folder_is_refused(source: Path, output: Path, tmp_path: Path, run: Run) -> None:
    """Otherwise, the export would delete all files in the folder that the link names."""
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    output.mkdir()
    (output / ".tiny-bert.export").symlink_to(tmp_path / "elsewhere")

    assert run(source, *FAST)[0] == 2
    assert (tmp_path / "elsewhere" / "inside").is_dir()
    assert left_in(output) == [".tiny-bert.export"]


def test_signals_are_deferred_while_the_new_bundle_replaces_the_old_one(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal between the two renames does not leave the name without a bundle, and the export succeeds."""
    tiny.bundle(output, "tiny-bert")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        result = rename(self, target)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(Path, "rename", interrupted)

    assert run(source, *FAST, "--overwrite")[0] == 0
    assert left_in(output) == ["tiny-bert"]
    assert load_bundle(output / "tiny-bert").manifest.source.checkpoint == "tiny-bert"
