"""The command bert-export: flags, exit codes, one clear line for each failure, and no half bundle ever."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import load_file

import tiny
from bertserve.export import cli
from bertserve.service import __version__
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, load_bundle
from checkpoints import bert, edit_json, edit_weights, few_texts
from outputs import FAST, Run, contents, left_in
from playback import play_back

pytestmark = pytest.mark.torch
pytest_plugins = ("command",)


@pytest.fixture(name="existing")
def existing_bundle(output: Path) -> dict[str, bytes]:
    """A models folder that has a bundle of the checkpoint's name; returns its files."""
    return contents(tiny.bundle(output, "tiny-bert"))


# ---- success


def test_the_validation_is_printed(source: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished export says on stdout where the bundle is and what was measured for each graph."""
    assert 0 == cli.main([str(source), "--output", str(output), "--calibration", str(few_texts(tmp_path))])

    out = capsys.readouterr().out
    assert out.startswith(f"{output / 'tiny-bert'}: text-classification, labels negative, positive, neutral\n")
    _, fp32, int8 = out.splitlines()  # a line for each graph
    assert all(fact in fp32 for fact in ("model.cpu.fp32.onnx", "MiB  default", "100.0% of", "at least 98% is expected"))
    assert "model.cpu.int8.onnx" in int8


@pytest.mark.usefixtures("played_back")
def test_all_measurements_are_printed_on_request(source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--verbose adds what was measured of each graph."""
    assert 0 == cli.main([str(source), "--output", str(output), *FAST, "--verbose"])

    out = capsys.readouterr().out
    assert all(fact in out for fact in ("answers agree on 100.0%", "(batch-invariant)", "fused", "milliseconds by tokens"))


def test_a_bundle_is_not_exported(tmp_path: Path, run: Run) -> None:
    """The message says what to do with it."""
    bundle = tiny.bundle(tmp_path)
    assert (1, f"bert-export: `{bundle}` is a bundle, not a checkpoint; serve it with `bert-serve serve --model {bundle}`.") == run(bundle)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, run: Run) -> None:
    """In words of ours, not of transformers."""
    code, message = run(tmp_path)
    assert (1, True) == (code, "has no `config.json`" in message)


@pytest.mark.usefixtures("played_back")
def test_progress_goes_to_stderr(source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage's line is on stderr, so that stdout holds the validation report alone."""
    cli.main([str(source), "--output", str(output), *FAST])

    captured = capsys.readouterr()
    assert ["load", "trace", "optimize", "reference", "parity", "package"] == [line.split()[0] for line in captured.err.splitlines()]
    assert "trace " not in captured.out


@pytest.mark.usefixtures("played_back")
def test_a_trailing_slash_does_not_change_the_name(source: Path, output: Path, run: Run) -> None:
    """`SOURCE/` gives the same bundle as `SOURCE`."""
    assert 0 == run(f"{source}/", *FAST)[0]
    assert ["tiny-bert"] == left_in(output)


@pytest.mark.usefixtures("played_back")
def test_the_current_folder_can_be_the_source(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` is named after the folder that it is."""
    monkeypatch.chdir(source)

    assert 0 == run(".", *FAST)[0]
    assert ["tiny-bert"] == left_in(output)


@pytest.mark.usefixtures("played_back")
def test_a_name_can_be_given(source: Path, output: Path, run: Run) -> None:
    """--name names folder and manifest."""
    assert 0 == run(source, *FAST, "--name", "sentiment")[0]
    assert "sentiment" == load_bundle(output / "sentiment").manifest.name


@pytest.mark.usefixtures("played_back")
def test_a_hub_id_is_downloaded_without_pickles_and_code(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only configuration, safetensors, vocabularies and the card are asked for, at the given revision."""
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(source)

    monkeypatch.setattr("bertserve.export.checkpoint.source.snapshot_download", download)

    assert 0 == run("org/model", *FAST, "--revision", "v1")[0]
    assert {
        "name": "org/model",
        "revision": "v1",
        "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model", "README.md"],
        "ignore_patterns": ["*/*"],
    } == asked
    origin = load_bundle(output / "model").manifest.source
    assert ("org/model", "v1") == (origin.checkpoint, origin.revision)


@pytest.mark.usefixtures("played_back")
def test_the_commit_of_a_download_stands_in_the_manifest(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache names a snapshot's folder after it; what was asked for is kept beside it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr(
        "bertserve.export.checkpoint.source.snapshot_download", lambda name, **_: str(source.rename(source.with_name(commit)))
    )

    assert 0 == run("org/model", *FAST, "--revision", "main")[0]
    origin = load_bundle(output / "model").manifest.source
    assert ("main", commit) == (origin.revision, origin.commit)
    assert f"commit `{commit}`" in (output / "model" / CARD_FILE).read_text(encoding="utf-8")


@pytest.mark.usefixtures("played_back")
def test_metrics_stand_in_manifest_and_card(source: Path, output: Path, run: Run, tmp_path: Path) -> None:
    """A file of metrics is stored and shown as given."""
    figures = [{"name": "accuracy, SST-2", "checkpoint": 0.8784, "graphs": {"cpu/fp32": 0.8784, "cpu/int8": 0.8761}}]
    (tmp_path / "figures.json").write_text(json.dumps(figures))

    assert 0 == run(source, *FAST, "--metrics-file", str(tmp_path / "figures.json"))[0]
    bundle = load_bundle(output / "tiny-bert")
    assert figures == [metric.model_dump() for metric in bundle.manifest.figures]
    assert "| accuracy, SST-2 | 0.8784 | 0.8784 | 0.8761 |" in (bundle.path / CARD_FILE).read_text(encoding="utf-8")


@pytest.mark.full_grid
def test_texts_of_ones_own_choose_the_scales(source: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--calibration replaces the built-in texts: the numbers that are reported are the file's, and the graph another."""
    digests = []
    for text in ("a very good film !", "1 2 3"):
        (tmp_path / "own.txt").write_text("".join(f"{text} {i}\n" for i in range(20)), encoding="utf-8")
        flags = ("--precision", "int8", "--overwrite", "--calibration", str(tmp_path / "own.txt"), "--max-int8-error", "1", "--quick")
        assert 0 == cli.main([str(source), "--output", str(output), *flags])
        assert "quantize  int8, calibrated on 14 texts, judged on 3 others" in capsys.readouterr().err
        digests.append(load_bundle(output / "tiny-bert").manifest.graphs[0].sha256)

    assert 2 == len(set(digests))


# ---- wrong usage


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--precision", "fp64"), "`fp64` is not a list of names from fp32, fp16, int8"),
        (
            ("--precision", "fp16"),
            "`fp16` is not available for cpu: cpu takes fp32, int8; cuda takes fp32, fp16; tensorrt takes fp32, fp16",
        ),
        (("--precision", ""), "`` is not a list of names from fp32, fp16, int8"),
        (("--provider", "cpu,cuda", "--precision", "int8"), "`int8` leaves no graph to make for cuda"),
        (("--provider", "cuda", "--precision", "fp16,int8"), "`int8` is not available for cuda"),
        (("--provider", "rocm"), "`rocm` is not a list of names from cpu, cuda, tensorrt"),
        (("--provider", "cpu,cpu"), "`cpu,cpu` is not a list of names"),
        (("--precision", "fp32,fp32"), "`fp32,fp32` is not a list of names"),
        (("--precision", "fp32, int8"), "`fp32, int8` is not a list of names"),
        (("--name", "../up"), "`../up` does not match"),
        (("--name", ".hidden"), "`.hidden` does not match"),
        (("--name", ""), "`` does not match"),
        (("--name", "a" * 65), "does not match"),
        (("--task", "translation"), "invalid choice: 'translation'"),
        (("--metrics-file", "no/such/file.json"), "`no/such/file.json` is not a list of metrics"),
        (("--precison", "fp32"), "did you mean --precision?"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(
    source: Path, output: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    """Exit code 2, the reason on stderr, before anything is done."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(source), "--output", str(output), *flags])

    assert 2 == exit_.value.code
    assert reason in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    "document",
    [
        "not json",
        "5",
        "[1]",
        "[{}]",
        '[{"name": "f1", "checkpoint": "high", "graphs": {}}]',
        '[{"name": "f1", "checkpoint": 1.0, "graphs": {}, "extra": 1}]',
        # an object is not a list, also where it has nothing in it; NaN could be written to a manifest but not read back
        "{}",
        '[{"name": "f1", "checkpoint": NaN, "graphs": {}}]',
    ],
)
def test_malformed_metrics_are_a_usage_error(source: Path, output: Path, tmp_path: Path, document: str) -> None:
    """Exit code 2 for whatever is not a list of metrics."""
    (tmp_path / "figures.json").write_text(document)

    with pytest.raises(SystemExit) as exit_:
        cli.main([str(source), "--output", str(output), *FAST, "--metrics-file", str(tmp_path / "figures.json")])

    assert 2 == exit_.value.code


@pytest.mark.parametrize(
    "command", [("x", "--output", "y", "--presicion", "int8"), ("--presicion", "int8"), ("verify", "x", "--presicion", "int8")]
)
def test_an_unknown_flag_gets_a_near_one(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is answered with the flag that was meant."""
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "unknown argument `--presicion`; did you mean --precision?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "new"), [(("x", "--figures", "f"), "--metrics-file"), (("verify", "x", "--min-figure=f1=1"), "--min-metric")]
)
def test_a_renamed_flag_gets_its_new_name(command: tuple[str, ...], new: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the one whose spelling is nearest."""
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert 2 == caught.value.code
    [line] = capsys.readouterr().err.splitlines()
    assert f"it is called {new} now." in line


def test_an_output_folder_must_be_given(source: Path) -> None:
    """--output has no default."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(source)])

    assert 2 == exit_.value.code


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the name and the version, and ends with 0."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])

    assert (0, f"bert-export {__version__}\n") == (exit_.value.code, capsys.readouterr().out)


@pytest.mark.parametrize("module", ["torch", "transformers", "onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Without the export extra the exit code is 3."""
    monkeypatch.setattr("bertserve.export.flags.find_spec", lambda name: None if name == module else importlib.util.find_spec(name))

    code, message = run(source)
    assert (3, True) == (code, message.startswith(f"bert-export: {module} not installed; exporting needs the export extra: pip install "))
    assert all(f" '{package}<" in message or f" {package}==" in message for package in ("torch", "transformers", "onnx", "onnxruntime"))
    assert not output.exists()


# ---- an existing bundle


def test_an_existing_bundle_is_not_replaced(source: Path, output: Path, existing: dict[str, bytes], run: Run) -> None:
    """Without --overwrite the exit code is 2, early, and the bundle stays."""
    code, message = run(source)

    assert 2 == code
    assert "--overwrite" in message
    assert existing == contents(output / "tiny-bert")


@pytest.mark.usefixtures("existing", "played_back")
def test_an_existing_bundle_is_replaced_when_asked(source: Path, output: Path, run: Run) -> None:
    """With --overwrite the new bundle stands in its place, and nothing of the old one or of the work is left."""
    assert 0 == run(source, *FAST, "--overwrite")[0]
    assert ["tiny-bert"] == left_in(output)
    assert "tiny-bert" == load_bundle(output / "tiny-bert").manifest.source.checkpoint


@pytest.mark.usefixtures("played_back")
def test_what_a_killed_export_left_aside_is_cleared(source: Path, output: Path, existing: dict[str, bytes], run: Run) -> None:
    """A `.old` folder from an export that was killed does not stop the next one, nor outlive it."""
    (output / ".tiny-bert.old").mkdir()
    (output / ".tiny-bert.old" / MANIFEST_FILE).write_bytes(existing[MANIFEST_FILE])

    assert 0 == run(source, *FAST, "--overwrite")[0]
    assert ["tiny-bert"] == left_in(output)


@pytest.mark.usefixtures("existing")
def test_a_failed_export_keeps_the_existing_bundle(source: Path, output: Path, existing: dict[str, bytes], run: Run) -> None:
    """--overwrite replaces only with a finished bundle."""
    edit_weights(source, lambda tensors: tensors.pop("classifier.weight"))

    assert 1 == run(source, *FAST, "--overwrite")[0]
    assert existing == contents(output / "tiny-bert")
    assert ["tiny-bert"] == left_in(output)


def test_an_output_that_is_a_file_is_said_to_be(source: Path, output: Path, run: Run) -> None:
    """--output of a file ends with 1 and names it."""
    output.write_text("not a folder")
    code, message = run(source, *FAST)

    assert 1 == code
    assert str(output) in message


# ---- checkpoints that cannot be exported


def remove(*names: str) -> Callable[[Path], None]:
    """Returns a change that removes files of a checkpoint."""

    def change(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return change


def write(name: str, content: bytes) -> Callable[[Path], object]:
    """Returns a change that replaces a file of a checkpoint."""
    return lambda path: (path / name).write_bytes(content)


def configure(**changes: Any) -> Callable[[Path], None]:
    """Returns a change of a checkpoint's config.json."""
    return lambda path: edit_json(path / "config.json", **changes)


def weigh(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Returns a change of a checkpoint's weights."""
    return lambda path: edit_weights(path, edit)


def pickle_weights(path: Path) -> None:
    """Leaves a checkpoint with pickled weights only, as old ones have them."""
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def drop_pad_token(path: Path) -> None:
    """Leaves tokenizer and configuration without a padding token, and no special token that no text gets."""
    edit_json(path / "config.json", pad_token_id=None)
    edit_json(path / "tokenizer.json", padding=None)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]"}))


def bare_encoder(path: Path) -> None:
    """Replaces the checkpoint with the encoder alone, claiming to be a classifier."""
    shutil.rmtree(path)
    bert(path.parent, path.name, architecture="BertModel")
    edit_json(path / "config.json", architectures=["BertForSequenceClassification"])


def small_embedding(path: Path) -> None:
    """Replaces the checkpoint with one whose embedding has fewer rows than the tokenizer has tokens."""
    shutil.rmtree(path)
    bert(path.parent, path.name, rows=40)


def fill(name: str, value: float) -> Callable[[Path], None]:
    """Returns a change that sets one weight of a tensor."""
    return weigh(lambda tensors: tensors[name].view(-1)[:1].fill_(value))


DENSE = "bert.encoder.layer.1.output.dense.weight"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        pytest.param(remove("config.json"), ["config.json"], id="no configuration"),
        pytest.param(write("config.json", b"{"), ["config", "not a valid JSON"], id="broken configuration"),
        pytest.param(configure(model_type="zorp"), ["`zorp`"], id="unknown model type"),
        pytest.param(
            configure(model_type="zorp", auto_map={"AutoConfig": "code.Config"}), ["custom code"], id="custom code of the checkpoint"
        ),
        pytest.param(configure(architectures=None), ["--task"], id="no architecture"),
        pytest.param(
            configure(architectures=["BertForNextSentencePrediction"]),
            ["BertForNextSentencePrediction", "--task"],
            id="architecture without a task",
        ),
        pytest.param(remove("model.safetensors"), ["weights", "model.safetensors"], id="no weights"),
        pytest.param(pickle_weights, ["Pickled weights are never loaded", "safetensors"], id="pickled weights only"),
        pytest.param(write("model.safetensors", b"garbage"), ["weights"], id="broken weights"),
        pytest.param(write("model.safetensors", LFS_POINTER), ["weights"], id="weights not fetched from git lfs"),
        pytest.param(remove("tokenizer.json", "tokenizer_config.json"), ["tokenizer"], id="no tokenizer"),
        pytest.param(remove("tokenizer.json"), ["tokenizer"], id="no fast tokenizer"),
        pytest.param(write("tokenizer.json", b"{"), ["tokenizer"], id="broken tokenizer"),
        pytest.param(drop_pad_token, ["no padding token", "`pad_token`"], id="no padding token"),
        pytest.param(fill(DENSE, float("nan")), [f"`{DENSE}`", "NaN"], id="NaN weights"),
        pytest.param(fill(DENSE, float("inf")), [f"`{DENSE}`", "infinite"], id="infinite weights"),
        pytest.param(weigh(lambda tensors: tensors[DENSE].fill_(3e38)), ["finite"], id="weights that overflow"),
        pytest.param(small_embedding, [f"{len(tiny.VOCABULARY)} tokens", "40 rows"], id="tokenizer larger than the embedding"),
        pytest.param(configure(id2label={"0": "a", "1": "a", "2": "b"}), ["labels", "distinct"], id="duplicate labels"),
        pytest.param(configure(id2label={"0": "a", "1": "b", "7": "c"}), ["labels", "ids 0 to 2"], id="gap in the labels"),
        pytest.param(configure(id2label={"0": "a", "1": "b"}), ["weights"], id="fewer labels than the head has"),
        pytest.param(bare_encoder, ["lacks weights", "classifier", "not fine-tuned"], id="encoder without a head"),
        pytest.param(weigh(lambda tensors: tensors.pop("classifier.bias")), ["lacks weights", "classifier.bias"], id="half a head"),
        pytest.param(configure(num_hidden_layers=3), ["lacks weights", "layer.2"], id="fewer layers than configured"),
    ],
)
def test_a_checkpoint_that_cannot_be_exported_is_refused_in_one_line(
    source: Path, output: Path, run: Run, change: Callable[[Path], object], facts: list[str]
) -> None:
    """Exit code 1, a line that names what is wrong, and nothing left in the output folder."""
    change(source)
    code, message = run(source, *FAST)

    assert 1 == code
    assert [] == [fact for fact in facts if fact not in message]
    assert [] == left_in(output)


def test_a_pickle_is_never_opened(source: Path, tmp_path: Path, run: Run) -> None:
    """Weights whose unpickling would run code do not run it."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))

    assert 1 == run(source)[0]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.usefixtures("played_back")
def test_a_card_that_is_not_utf_8_does_not_stop_the_export(source: Path, output: Path, run: Run) -> None:
    """A README.md in another encoding is no reason to fail."""
    (source / "README.md").write_bytes("# Café".encode("latin-1"))

    assert 0 == run(source, *FAST)[0]
    assert ["tiny-bert"] == left_in(output)


@pytest.mark.full_grid
def test_int8_of_a_small_vocabulary_keeps_its_table_in_float(source: Path, output: Path, tmp_path: Path) -> None:
    """Where no embedding is large enough to be worth the lost precision the matrices alone are quantized."""
    shutil.rmtree(source)
    bert(source.parent, source.name, rows=200)

    flags = ("--precision", "int8", "--max-int8-error", "1", "--calibration", str(few_texts(tmp_path)))
    assert 0 == cli.main([str(source), "--output", str(output), *flags])
    [graph] = load_bundle(output / "tiny-bert").manifest.graphs
    assert (10, 0) == (graph.evidence.quantized["MatMulIntegerToFloat"], graph.evidence.quantized["PerRowEmbedding"])
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(output / "tiny-bert" / graph.file)).graph.initializer}
    [table] = [value for name, value in tensors.items() if name.endswith("word_embeddings.weight")]
    np.testing.assert_array_equal(load_file(source / "model.safetensors")["bert.embeddings.word_embeddings.weight"], table)


def test_a_task_that_does_not_fit_the_checkpoint_is_refused(source: Path, output: Path, run: Run) -> None:
    """--task against the architecture ends with 1 and names both."""
    message = (
        "bert-export: the checkpoint is a BertForSequenceClassification, made for text-classification; "
        "--task token-classification does not match it."
    )
    assert (1, message) == run(source, "--task", "token-classification")
    assert not output.exists()


@pytest.mark.parametrize("where", ["./nowhere", "/nowhere/at/all", "../nowhere", "a/b/c"])
def test_a_folder_that_does_not_exist_is_said_not_to(where: str, run: Run) -> None:
    """What looks like a path is not looked for on the hub."""
    assert (1, f"bert-export: the folder `{where}` does not exist.") == run(where)


@pytest.mark.parametrize("name", ["org/model", "model"])
def test_a_hub_id_without_network_is_refused(name: str, output: Path, run: Run) -> None:
    """An id that the hub does not give ends with 1 and says what to check."""
    code, message = run(name)

    assert 1 == code
    assert f"`{name}`" in message
    assert "network" in message
    assert not output.exists()


def test_a_source_whose_name_cannot_be_a_bundles_is_refused_early(tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder name that no model may have asks for --name, before any stage runs."""
    code = cli.main([str(bert(tmp_path, "my checkpoint")), "--output", str(output), *FAST])

    err = capsys.readouterr().err
    assert code in (1, 2)
    assert "--name" in err
    assert "trace" not in err
    assert [] == left_in(output)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        pytest.param(None, "cannot be read", id="no file"),
        pytest.param(b"na\xefve\n" * 20, "cannot be read", id="not UTF-8"),
        pytest.param(b"a\n\nb\n" * 15, "has 2 different texts, but calibration needs at least 16", id="too few texts"),
        pytest.param(b"", "has 0 different texts", id="empty"),
    ],
)
def test_calibration_texts_that_cannot_be_used_are_refused(
    source: Path, output: Path, run: Run, tmp_path: Path, content: bytes | None, fact: str
) -> None:
    """Exit code 1, a line that names the file and what is wrong with it, and nothing left in the output folder."""
    if content is not None:
        (tmp_path / "own.txt").write_bytes(content)
    code, message = run(source, "--calibration", str(tmp_path / "own.txt"))

    assert 1 == code
    assert [] == [part for part in (f"`{tmp_path / 'own.txt'}`", fact) if part not in message]
    assert [] == left_in(output)


# ---- interrupted


def interrupt(*_: Any, **__: Any) -> Any:
    """Stands for a stage during which Ctrl-C is pressed."""
    raise KeyboardInterrupt


STAGES = [
    "trace.trace",
    "cpu.fuse",
    "graph.cpu_passes.unfuse",
    "validation.reference.Reference",
    "int8.quantize.quantize",
    "validation.measure.measure_parity",
    "bundle.model_card",
]


@pytest.mark.parametrize("stage", [STAGES[0], *(pytest.param(stage, marks=pytest.mark.full_grid) for stage in STAGES[2:6:2])])
def test_an_interrupted_export_leaves_nothing(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Ctrl-C leaves no bundle and no temporary folder."""
    play_back(monkeypatch, source)
    monkeypatch.setattr(f"bertserve.export.{stage}", interrupt)

    assert 130 == cli.main([str(source), "--output", str(output)])
    assert [] == left_in(output)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_export_keeps_the_existing_bundle(
    source: Path, output: Path, existing: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Ctrl-C in any stage of an overwriting export leaves the old bundle as it was; once with every stage before it real."""
    if stage != STAGES[-1]:
        play_back(monkeypatch, source)
    monkeypatch.setattr(f"bertserve.export.{stage}", interrupt)

    assert 130 == cli.main([str(source), "--output", str(output), "--overwrite", "--calibration", str(few_texts(tmp_path))])
    assert ["tiny-bert"] == left_in(output)
    assert existing == contents(output / "tiny-bert")


@pytest.mark.usefixtures("played_back")
def test_a_bundle_that_cannot_be_put_in_place_keeps_the_existing_one(
    source: Path, output: Path, existing: dict[str, bytes], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new folder cannot be renamed into place the old one is put back."""
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if self.name == "bundle":
            raise PermissionError(13, "Permission denied", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new)

    assert 1 == run(source, *FAST, "--overwrite")[0]
    assert ["tiny-bert"] == left_in(output)
    assert existing == contents(output / "tiny-bert")


def test_transformers_is_offline() -> None:
    """No test of this folder may reach for the network."""
    assert transformers.utils.hub.is_offline_mode()


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1", "nan", "little"])
def test_a_gate_that_is_no_share_is_wrong_usage(source: Path, output: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--max-int8-error is a number above 0 and at most 1; nothing else is guessed, and nothing is written."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(source), "--output", str(output), "--max-int8-error", value])

    assert 2 == stopped.value.code
    assert f"--max-int8-error: `{value}` is not" in capsys.readouterr().err
    assert not output.exists()
