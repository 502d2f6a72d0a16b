"""bert-export verify: its checks, its metrics on data, its report and its exit codes. Most tests do not need torch."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from bertserve.export import cli
from bertserve.service.bundle.files import MANIFEST_FILE, load_bundle
from support import tiny
from support.bundles import FEW_TEXTS, Verify, exported, usage_error
from support.sound_bundles import FP32, TEXTS, data, sound, store_digests, store_example, with_gpu_graph, without_gpu


def passed(checks: dict[str, Any]) -> dict[str, bool | None]:
    """Returns whether each check passed; None for checks that only report."""
    return {name: check["passed"] for name, check in checks.items()}


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"])
def test_a_sound_bundle_passes(tmp_path: Path, verify: Verify, task: str) -> None:
    code, checks = verify(sound(tmp_path, task))

    assert (code, list(checks)) == (0, ["files", "validation cpu/fp32", "example cpu/fp32", "batches cpu/fp32"])


def test_a_closed_stdout_ends_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the pipe to `head`. Closing the file writes the rest of its buffer."""
    bundle = sound(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["verify", str(bundle), "--json"]) == 1


def alter(path: Path) -> None:
    (path / FP32).write_bytes(b"x")


GRAPH_PASSED = {"files": True, "validation cpu/fp32": True, "example cpu/fp32": True, "batches cpu/fp32": True}


@pytest.mark.parametrize(
    ("damage", "expected", "word"),
    [
        pytest.param(alter, {"files": False}, "sha256", id="an altered file"),
        pytest.param(lambda path: (path / MANIFEST_FILE).unlink(), {"files": False}, MANIFEST_FILE, id="no bundle"),
        pytest.param(
            lambda path: (alter(path), store_digests(path)),
            {"files": True, "validation cpu/fp32": True, "engine cpu/fp32": False, "graphs": False},
            "",
            id="no graph",
        ),
        pytest.param(
            lambda path: tiny.edit(path, lambda manifest: manifest["graphs"][0]["validation"].update(samples=0)),
            GRAPH_PASSED | {"validation cpu/fp32": False},
            "",
            id="no validation",
        ),
        pytest.param(
            lambda path: tiny.edit(path, lambda manifest: manifest["example"]["result"][0][0].update(score=0.123)),
            GRAPH_PASSED | {"example cpu/fp32": False},
            "0.123",
            id="another answer than the stored one",
        ),
    ],
)
def test_a_damaged_bundle_fails(
    tmp_path: Path, verify: Verify, damage: Callable[[Path], object], expected: dict[str, bool], word: str
) -> None:
    path = sound(tmp_path)
    damage(path)
    code, checks = verify(path)

    assert (code, passed(checks)) == (1, expected)
    assert word in next(check["detail"] for check in checks.values() if not check["passed"])


def test_a_false_claim_of_batch_invariance_fails(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path)
    model = onnx.load(str(path / FP32))
    gemm = model.graph.node[-1]
    gemm.input[0] = "leaky"
    model.graph.node.insert(len(model.graph.node) - 1, onnx.helper.make_node("ReduceMean", ["mean"], ["all"], axes=[0]))
    model.graph.node.insert(len(model.graph.node) - 1, onnx.helper.make_node("Add", ["mean", "all"], ["leaky"]))
    onnx.save(model, str(path / FP32))
    store_example(store_digests(path))
    code, checks = verify(path)

    assert (code, passed(checks)) == (1, GRAPH_PASSED | {"batches cpu/fp32": False})
    assert checks["batches cpu/fp32"]["metrics"]["worst_batch_error"] > 0.01
    assert verify(tiny.edit(path, lambda manifest: manifest["graphs"][0].update(batch_invariant=False)))[0] == 0


@pytest.mark.parametrize(("flag", "value", "missing"), [("--provider", "cpu,tensorrt", "tensorrt"), ("--precision", "fp32,fp16", "fp16")])
def test_a_requested_graph_that_the_bundle_lacks_fails(tmp_path: Path, verify: Verify, flag: str, value: str, missing: str) -> None:
    code, checks = verify(sound(tmp_path), flag, value)

    assert code == 1
    assert passed(checks) == {"files": True, "graphs": False}
    assert all(fact in checks["graphs"]["detail"] for fact in (missing, "cpu/fp32"))


@without_gpu
def test_every_graph_is_checked_with_its_validation_report(tmp_path: Path, verify: Verify) -> None:
    """Without its provider, a graph runs on the CPU, as it did at the export, and the report says so. A flag selects graphs."""
    path = with_gpu_graph(sound(tmp_path))
    cuda = {f"{check} cuda/fp16": True for check in ("validation", "example", "batches")}
    code, checks = verify(path)

    assert (code, passed(checks)) == (0, GRAPH_PASSED | cuda | {"engine cuda/fp16": None})
    assert "cuda is not available" in checks["engine cuda/fp16"]["detail"]
    assert "2.5e-01" in checks["validation cuda/fp16"]["detail"]
    assert checks["validation cuda/fp16"]["metrics"]["samples"] == 18
    assert passed(verify(path, "--provider", "cpu")[1]) == GRAPH_PASSED


@without_gpu
def test_a_requested_provider_must_be_available(tmp_path: Path, verify: Verify) -> None:
    code, checks = verify(with_gpu_graph(sound(tmp_path)), "--provider", "cuda")

    assert (code, passed(checks)) == (1, {"files": True, "validation cuda/fp16": True, "engine cuda/fp16": False, "graphs": False})
    assert "CUDAExecutionProvider" in checks["engine cuda/fp16"]["detail"]


def test_another_precision_can_give_another_example_result(tmp_path: Path, verify: Verify) -> None:
    """The stored result is the default graph's. A difference in another precision is reported, but is not a failure."""
    _, checks = verify(sound(tmp_path, other_seed=1))

    assert tuple(checks[f"example cpu/{precision}"]["passed"] for precision in ("int8", "fp32")) == (True, None)
    assert "of the int8 graph" in checks["example cpu/fp32"]["detail"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "B --min-agreement 0.5",
        "B --min-agreement 2",
        "B --gold",
        "B --min-metric accuracy=0.5",
        "B --data D --min-metric accuracy",
        "B --data D --min-metric accuracy=0.5 --min-metric Accuracy=0.6",
        "B --data D --min-metric glue=0.5",
        "B C",
        "B --update",
        "B --checkpoint=",
        "B --int8-validation F",
        "B --update --checkpoint C --provider cpu",
        "B --revision v1",
        "B --trust-module",
        "B --module a.py:make",
        "B --module a.py:make --trust-module --checkpoint .",
        "B --module a.py:make --trust-module --revision v1",
    ],
)
def test_a_wrong_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    usage_error(capsys, "verify", *flags.split())


def test_a_missing_torch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    path = str(sound(tmp_path))

    assert cli.main(["verify", path]) == 0
    assert cli.main(["verify", path, "--checkpoint", "x"]) == 3
    assert "bert-export: torch " in capsys.readouterr().err


@pytest.fixture(name="exported", scope="module")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from support.checkpoints import bert

    folder = tmp_path_factory.mktemp("verify")
    source = bert(folder)
    return source, exported(source, precisions=("fp32", "int8")).path


@pytest.mark.torch
def test_a_bundle_passes_against_its_checkpoint(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    source, target = exported
    lines = data(tmp_path, *({"text": text, "label": 0} for text in [*TEXTS, "the film was not very good , " * 40]))
    code, checks = verify(target, "--checkpoint", source, "--data", lines)

    graphs = ("cpu/fp32", "cpu/int8")
    order = ["files", "data", *(f"{check} {graph}" for graph in graphs for check in ("validation", "example"))]
    order += ["checkpoint", "settings", *(f"batches {graph}" for graph in graphs)]
    order += [f"{check} {graph}" for graph in graphs for check in ("parity", "agreement", "accuracy", "macro F1", "Matthews correlation")]
    assert (code, list(checks)) == (0, order)
    assert checks["agreement cpu/int8"]["metrics"]["reference"] == "the checkpoint"
    assert checks["agreement cpu/int8"]["metrics"]["agreement"] >= 6 / 7
    assert checks["agreement cpu/fp32"]["metrics"]["agreement"] == 1.0
    assert set(checks["accuracy cpu/fp32"]["metrics"]) == {"graph", "reference"}


@pytest.mark.torch
def test_another_checkpoint_fails_and_is_not_written_into_the_bundle(exported: tuple[Path, Path], tmp_path: Path, verify: Verify) -> None:
    """Its weights and labels differ."""
    from support.checkpoints import bert, edit_weights

    other = bert(tmp_path, labels=("good", "bad", "so-so"))
    edit_weights(other, lambda tensors: tensors["classifier.bias"].add_(0.5))
    before = (exported[1] / MANIFEST_FILE).read_bytes()
    code, checks = verify(exported[1], "--checkpoint", other, "--update")

    assert code == 1
    assert checks["checkpoint"]["passed"] is False
    assert checks["parity cpu/fp32"]["passed"] is False
    assert " 5.00e-01, " in checks["parity cpu/fp32"]["detail"]
    assert checks["settings"]["passed"] is False
    assert " labels: " in checks["settings"]["detail"]
    assert (exported[1] / MANIFEST_FILE).read_bytes() == before
    assert "update" not in checks


@pytest.mark.torch
def test_settings_that_differ_from_the_checkpoints_are_named(tmp_path: Path) -> None:
    """The layers and their combination are chosen at the export, so they do not count as differences."""
    from bertserve.export.checkpoint.load import load_checkpoint
    from bertserve.export.validation.checkpoint_check import compare_settings
    from support.checkpoints import encoder, sentence_transformers

    checkpoint = load_checkpoint(str(sentence_transformers(encoder(tmp_path), "Normalize")))
    settings = {"labels": (), "activation": checkpoint.activation, "tokenizer": checkpoint.tokenizer}
    settings["embedding"] = checkpoint.embedding.model_copy(update={"layers": (0, 3, 4), "default_layers": (-2, -1), "combine": "mean"})
    manifest = load_bundle(tiny.bundle(tmp_path, task="feature-extraction")).manifest.model_copy(update=settings)
    assert compare_settings(manifest, checkpoint) is None
    for part, name, value in (
        ("embedding", "pooling", "max"),
        ("embedding", "normalize", False),
        ("embedding", "prompts", {"query": "other: "}),
        ("tokenizer", "truncation_side", "left"),
    ):
        other = manifest.model_copy(update={part: getattr(manifest, part).model_copy(update={name: value})})
        assert str(compare_settings(other, checkpoint)).startswith(f"{part}: {name}: ")
    assert str(compare_settings(manifest.model_copy(update={"activation": "sigmoid"}), checkpoint)).startswith("activation: ")


@pytest.mark.torch
def test_update_measures_everything_again(
    exported: tuple[Path, Path], verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, errors and operations are measured again, and the card is read again. All other fields and files stay the same.

    A signal does not stop the command between both files, or with a hidden file left.
    """
    source, target = exported
    path = Path(shutil.copytree(target, tmp_path / target.name))

    def age(manifest: dict[str, Any]) -> None:
        manifest["flops"]["linear"] = 1.0
        manifest["source"]["license"] = ["mit"]  # the card's license at the time of the export
        for graph in manifest["graphs"]:
            graph["validation"] |= {"lengths": [], "speed": None, "agreement": None}

    tiny.edit(path, age)
    replace = os.replace

    def replace_at_a_signal(*paths: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_at_a_signal)
    code, checks = verify(path, "--checkpoint", source, "--update", "--int8-validation", FEW_TEXTS)  # the texts of the export

    assert (code, checks["update"]["passed"]) == (0, True)
    for graph in load_bundle(target).manifest.graphs:
        metrics = checks[f"parity cpu/{graph.precision}"]["metrics"]
        assert metrics["worst_abs_error"] == pytest.approx(graph.validation.worst_abs_error, rel=0.05, abs=1e-6)
        assert [entry["up_to"] for entry in metrics["lengths"]] == [entry.up_to for entry in graph.validation.lengths]
    new, renewed = (json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")) for folder in (target, path))
    for manifest in (new, renewed):
        for graph in manifest["graphs"]:
            assert [entry.pop("length") for entry in graph["validation"]["speed"].pop("timings")][-1:] == [160]
    assert renewed == new
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in target.iterdir())
    assert "median milliseconds" in (path / "README.md").read_text(encoding="utf-8")


@pytest.mark.torch
def test_update_keeps_the_calibration_in_the_card(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    source, target = exported
    path = tiny.calibrate(Path(shutil.copytree(target, tmp_path / target.name)))
    assert verify(path, "--checkpoint", source, "--update", "--int8-validation", FEW_TEXTS)[0] == 0

    [calibrated] = [graph for graph in load_bundle(path).manifest.graphs if graph.calibration is not None]
    diagram = f"reliability.cpu.{calibrated.precision}.svg"
    assert all(fact in (path / "README.md").read_text(encoding="utf-8") for fact in ("## Calibration", diagram))
    assert (path / diagram).exists()


@pytest.mark.torch
@pytest.mark.full_grid
def test_a_folder_called_verify_can_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.checkpoints import bert

    bert(tmp_path, "verify")
    monkeypatch.chdir(tmp_path)

    assert cli.main(["./verify", "--output", "a", "--precision", "fp32"]) == 0
    assert cli.main(["--output", "b", "--precision", "fp32", "verify"]) == 0
    assert [load_bundle(tmp_path / folder / "verify").manifest.name for folder in ("a", "b")] == ["verify"] * 2


@pytest.mark.torch
def test_a_revision_of_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bertserve.export.checkpoint.load import LoadOptions
    from bertserve.export.errors import ExportError
    from bertserve.export.validation import checkpoint_check

    def load(source: str, options: LoadOptions) -> None:
        raise ExportError(f"not here: {source} {options.revision}")

    monkeypatch.setattr(checkpoint_check, "load_checkpoint", load)
    assert cli.main(["verify", str(sound(tmp_path)), "--checkpoint", "org/model", "--revision", "v1"]) == 1
    assert "org/model v1" in capsys.readouterr().err
