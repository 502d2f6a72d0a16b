"""bert-export verify: what it checks, what it measures on data, its report and its exit codes. Mostly without torch."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import tiny
from bertserve.export import cli
from bertserve.export.tasks import text_classification
from bertserve.export.validation.agreement import TRAINED_LARGEST, RowErrors
from bertserve.export.validation.samples import predict
from bertserve.export.verify.graph_checks import Check
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.backend.sessions import why_not
from bertserve.service.bundle.files import MANIFEST_FILE, Bundle, digest, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.tasks.body import Limits
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.reading import read_body

TEXTS = ["a good film", "a bad book", "very dull !", "the film was not great", "fine", "poor , but short ."]
Verify = Callable[..., tuple[int, dict[str, Any]]]


def on_cpu(bundle: Bundle, graph: GraphSpec) -> OnnxEngine:
    """Returns an engine that runs a graph on the CPU, whatever it was made for."""
    spec = bundle.manifest.tokenizer
    return OnnxEngine(bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider="cpu")


def answer(bundle: Bundle, body: dict[str, Any], precision: Any = "auto") -> Any:
    """Returns what a graph of a bundle answers to a request body."""
    spec, engine = bundle.manifest.tokenizer, on_cpu(bundle, bundle.graph("cpu", precision))
    read = read_body(bundle.manifest.task, json.dumps(body).encode(), Limits(max_inputs=3, max_chars=1000))
    [request] = read.requests(bundle.manifest)
    return read.answer([predict(bundle.manifest.task, request, Tokenizer(bundle.tokenizer_path, spec), engine, bundle.manifest)])


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Changes a bundle's manifest."""
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    change(manifest)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return path


def sound(folder: Path, task: str = "text-classification", *, other_seed: int | None = None, **fields: Any) -> Path:
    """Writes a tiny bundle that passes: with a validation report, and the result of its example.

    Args:
        folder: The models folder.
        task: Its task.
        other_seed: If given there is an fp32 graph of this seed too, and the default one, of seed 0, goes as int8.
        fields: Other fields of the manifest.
    """
    path = tiny.bundle(folder, task, task=task, max_length=160, **fields)

    def complete(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["evidence"]["samples"] = 18
        if other_seed is not None:
            (path / graph["file"]).rename(path / "model.cpu.int8.onnx")
            onnx.save(tiny.graph(task, labels=len(manifest["labels"]), seed=other_seed), str(path / "model.cpu.fp32.onnx"))
            other = graph | {"default": False, "sha256": digest(path / "model.cpu.fp32.onnx")}
            manifest["graphs"] = [graph | {"file": "model.cpu.int8.onnx", "precision": "int8"}, other]

    edit(path, complete)
    bundle = load_bundle(path)
    result = answer(bundle, bundle.manifest.example.request)
    return edit(path, lambda manifest: manifest["example"].update(result=result))


@pytest.fixture(name="verify")
def verify_command(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Returns `verify(bundle, *flags)`, which gives the exit code and the checks by name."""

    def run(path: object, *flags: object) -> tuple[int, dict[str, Any]]:
        code = cli.main(["verify", str(path), "--json", *map(str, flags)])
        report = json.loads(capsys.readouterr().out)
        assert report["passed"] is (code == 0)
        return code, {check["name"]: check for check in report["checks"]}

    return run


def data(folder: Path, *lines: Any) -> Path:
    """Writes JSONL."""
    path = folder / "data.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


# ---- the bundle alone


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"])
def test_a_sound_bundle_passes(tmp_path: Path, verify: Verify, task: str) -> None:
    """Files, validation report, example and batches are checked, for every task."""
    code, checks = verify(sound(tmp_path, task))

    assert (0, ["files", "validation cpu/fp32", "example cpu/fp32", "batches cpu/fp32"]) == (code, list(checks))


def test_the_report_is_a_line_for_each_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a person can read it."""
    assert 0 == cli.main(["verify", str(sound(tmp_path))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]

    assert [["ok", name] for name in ("files", "validation", "example", "batches")] == [line[:2] for line in lines]


def test_the_current_folder_can_be_verified(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` is named after the folder that it is."""
    monkeypatch.chdir(sound(tmp_path))

    assert 0 == verify(".")[0]


def test_an_altered_file_fails(tmp_path: Path, verify: Verify) -> None:
    """The digest tells; nothing after it is tried."""
    path = sound(tmp_path)
    (path / "model.cpu.fp32.onnx").write_bytes(b"x")
    code, checks = verify(path)

    assert (1, ["files"]) == (code, list(checks))
    assert "was altered" in checks["files"]["detail"]


def test_a_folder_that_is_no_bundle_fails(tmp_path: Path, verify: Verify) -> None:
    """It is said to be none."""
    code, checks = verify(tmp_path)

    assert (1, ["files"]) == (code, list(checks))
    assert "is not a bundle" in checks["files"]["detail"]


def test_a_graph_that_is_no_graph_fails(tmp_path: Path, verify: Verify) -> None:
    """A file that the manifest vouches for, and onnxruntime cannot load."""
    path = sound(tmp_path)
    (path / "model.cpu.fp32.onnx").write_bytes(b"x")
    edit(path, lambda manifest: manifest["graphs"][0].update(sha256=digest(path / "model.cpu.fp32.onnx")))
    code, checks = verify(path)

    assert (1, ["files", "validation cpu/fp32", "engine cpu/fp32"]) == (code, list(checks))


def test_a_bundle_without_validation_fails(tmp_path: Path, verify: Verify) -> None:
    """0 parity inputs prove nothing; the other checks go on."""
    path = edit(sound(tmp_path), lambda manifest: manifest["graphs"][0]["evidence"].update(samples=0))
    code, checks = verify(path)

    assert (1, False, True) == (code, checks["validation cpu/fp32"]["passed"], checks["example cpu/fp32"]["passed"])


def test_another_answer_than_the_stored_one_fails(tmp_path: Path, verify: Verify) -> None:
    """The example's result is compared, scores with a tolerance."""
    path = edit(sound(tmp_path), lambda manifest: manifest["example"]["result"][0][0].update(score=0.123))
    code, checks = verify(path)

    assert (1, False) == (code, checks["example cpu/fp32"]["passed"])
    assert "differs from the stored 0.123" in checks["example cpu/fp32"]["detail"]


def test_a_false_claim_of_independence_fails(tmp_path: Path, verify: Verify) -> None:
    """A graph whose rows move with their neighbors, and whose manifest denies it."""
    path = sound(tmp_path)
    file = path / "model.cpu.fp32.onnx"
    model = onnx.load(str(file))
    *nodes, gemm = model.graph.node
    gemm.input[0] = "leaky"
    mean = onnx.helper.make_node("ReduceMean", ["mean"], ["all"], axes=[0])
    nodes += [mean, onnx.helper.make_node("Add", ["mean", "all"], ["leaky"]), gemm]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, str(file))
    edit(path, lambda manifest: manifest["graphs"][0].update(sha256=digest(file)))
    edit(path, lambda manifest: manifest["example"].update(result=answer(load_bundle(path), manifest["example"]["request"])))
    code, checks = verify(path)

    assert (1, False, True) == (code, checks["batches cpu/fp32"]["passed"], checks["example cpu/fp32"]["passed"])
    assert checks["batches cpu/fp32"]["metrics"]["worst_row_error"] > 0.01
    assert 0 == verify(edit(path, lambda manifest: manifest["graphs"][0].update(batch_invariant=False)))[0]


def test_a_graph_that_the_bundle_does_not_have_fails(tmp_path: Path, verify: Verify) -> None:
    """The message says which graphs there are."""
    for flags, lacks in (
        (("--provider", "cuda"), "no graph for `cuda`"),
        (("--precision", "int8"), "no graph for `int8`"),
        (("--provider", "cpu,tensorrt"), "no graph for `tensorrt`"),
    ):
        code, checks = verify(sound(tmp_path / flags[1]), *flags)

        assert (1, ["files", "graphs"]) == (code, list(checks))
        assert f"{lacks}; it has cpu/fp32." in checks["graphs"]["detail"]


def with_gpu_graph(path: Path, *, runnable: bool = True) -> Path:
    """Adds a CUDA graph in fp16 to a bundle of fp32: the same one, or a file that is no graph."""
    file = path / "model.cuda.fp16.onnx"
    file.write_bytes((path / "model.cpu.fp32.onnx").read_bytes() if runnable else b"x")

    def add(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        other = {"file": file.name, "sha256": digest(file), "provider": "cuda", "precision": "fp16"}
        manifest["graphs"].append(graph | other | {"evidence": graph["evidence"] | {"worst_abs_error": 0.25}})

    return edit(path, add)


def test_every_graph_is_checked_with_its_validation(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose provider is not there runs on the CPU, as it did at export, which is said; flags choose among the graphs."""
    monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None if provider == "cpu" else "no driver.")
    path = with_gpu_graph(sound(tmp_path))
    each = [[f"{check} {graph}" for check in ("validation", "example", "batches")] for graph in ("cpu/fp32", "cuda/fp16")]
    code, checks = verify(path)

    assert (0, ["files", *each[0], each[1][0], "engine cuda/fp16", *each[1][1:]]) == (code, list(checks))
    assert (None, "checked on the CPU, because cuda is not available (no driver.)") == (
        checks["engine cuda/fp16"]["passed"],
        checks["engine cuda/fp16"]["detail"],
    )
    assert "worst logit error 2.5e-01" in checks["validation cuda/fp16"]["detail"]
    assert 18 == checks["validation cuda/fp16"]["metrics"]["samples"]
    assert ["files", *each[0]] == list(verify(path, "--precision", "fp32")[1]) == list(verify(path, "--provider", "cpu")[1])
    assert "has no graph for cpu in fp16" in verify(path, "--provider", "cpu", "--precision", "fp16")[1]["graphs"]["detail"]


@pytest.mark.skipif(why_not("cuda") is None, reason="CUDA is there")
def test_a_provider_that_was_asked_for_must_be_there(tmp_path: Path, verify: Verify) -> None:
    """Nothing takes its place: the check fails and says what is missing."""
    code, checks = verify(with_gpu_graph(sound(tmp_path)), "--provider", "cuda")

    assert (1, ["files", "validation cuda/fp16", "engine cuda/fp16"]) == (code, list(checks))
    assert "CUDAExecutionProvider" in checks["engine cuda/fp16"]["detail"]


def test_a_graph_that_nothing_here_can_run_is_left_out(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its provider nor the CPU: that says nothing against the bundle; against a graph for the CPU it does."""
    monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None if provider == "cpu" else "no driver.")
    code, checks = verify(with_gpu_graph(sound(tmp_path), runnable=False))

    assert (0, None) == (code, checks["engine cuda/fp16"]["passed"])
    assert "not checked: cuda is not available (no driver.), and the CPU cannot run it (" in checks["engine cuda/fp16"]["detail"]
    assert "example cuda/fp16" not in checks


def test_another_precision_may_answer_the_example_otherwise(tmp_path: Path, verify: Verify) -> None:
    """The stored result is that of the default graph: from a graph of another precision a difference is said, and is no fault."""
    _, checks = verify(sound(tmp_path, other_seed=1))

    assert (True, None) == tuple(checks[f"example cpu/{precision}"]["passed"] for precision in ("int8", "fp32"))
    assert "not the stored result, which is that of int8: " in checks["example cpu/fp32"]["detail"]


def test_half_precision_may_round_otherwise_in_a_batch(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be another answer in fp32 is rounding in fp16, up to the bound that the export has."""
    path = with_gpu_graph(sound(tmp_path))
    for error, passed in ((1e-3, [False, True]), (1e-1, [False, False])):
        found = RowErrors(error, error / TRAINED_LARGEST, 1.0)
        monkeypatch.setattr("bertserve.export.verify.graph_checks.measure_row_errors", lambda engine, encodings, alone, found=found: found)
        monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None)
        monkeypatch.setattr(
            "bertserve.export.verify.graph_checks.LoadedGraph.engine", property(lambda loaded: on_cpu(loaded.bundle, loaded.graph))
        )
        _, checks = verify(path)
        assert passed == [checks[f"batches {name}"]["passed"] for name in ("cpu/fp32", "cuda/fp16")]


# ---- data


def test_agreement_is_measured_against_the_fp32_graph(tmp_path: Path, verify: Verify) -> None:
    """The share of inputs on which both graphs have the same best label; without a floor it is only said."""
    path = sound(tmp_path, other_seed=1)
    bundle = load_bundle(path)
    best = [[answer(bundle, {"inputs": text}, precision)[0][0]["label"] for text in TEXTS] for precision in ("int8", "fp32")]
    expected = sum(a == b for a, b in zip(*best, strict=True)) / len(TEXTS)
    assert 0 < expected < 1  # of all or none nothing could be told

    code, checks = verify(path, "--data", data(tmp_path, *({"text": text, "label": 0} for text in TEXTS)))
    metrics = checks["agreement cpu/int8"]["metrics"]
    assert (0, None) == (code, checks["agreement cpu/int8"]["passed"])
    assert "agreement cpu/fp32" not in checks  # the graph that others are compared with
    assert (pytest.approx(expected), len(TEXTS), "the fp32 graph") == (metrics["agreement"], metrics["inputs"], metrics["reference"])


@pytest.mark.parametrize(("seed", "code"), [(0, 0), (1, 1)])
def test_a_floor_decides(tmp_path: Path, verify: Verify, seed: int, code: int) -> None:
    """--min-agreement passes equal graphs and fails different ones."""
    path = data(tmp_path, *({"text": text} for text in TEXTS))

    for flags in ((), ("--precision", "int8")):
        found, checks = verify(sound(tmp_path / str(len(flags)), other_seed=seed), "--data", path, "--min-agreement", "0.99", *flags)
        assert (code, code == 0) == (found, checks["agreement cpu/int8"]["passed"])


def test_a_floor_needs_something_to_compare_with(tmp_path: Path, verify: Verify) -> None:
    """With one graph and no checkpoint there is no agreement, which is said, and fails a floor."""
    path, lines = sound(tmp_path), data(tmp_path, {"text": "good", "label": 0})

    assert (0, None) == (verify(path, "--data", lines)[0], verify(path, "--data", lines)[1]["agreement cpu/fp32"]["passed"])
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")
    assert 1 == code
    assert "give --checkpoint" in checks["agreement cpu/fp32"]["detail"]


def test_a_floor_that_nothing_was_measured_for_fails(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that does not run here passes without the floor, which says nothing against it."""
    monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None if provider == "cpu" else "no driver.")

    def drop_cpu(manifest: dict[str, Any]) -> None:
        manifest["graphs"] = [graph for graph in manifest["graphs"] if graph["provider"] == "cuda"]

    path, lines = edit(with_gpu_graph(sound(tmp_path), runnable=False), drop_cpu), data(tmp_path, {"text": "good", "label": 0})

    assert 0 == verify(path, "--data", lines)[0]
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.9")
    assert (1, False) == (code, checks["agreement cuda/fp16"]["passed"])
    assert "so the required 0.9 was not measured" in checks["agreement cuda/fp16"]["detail"]


def test_a_graph_that_does_not_run_fails_what_was_asked_for(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another that does, and for a comparison with the checkpoint: what was not compared has not passed."""
    monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None if provider == "cpu" else "no driver.")
    path, lines = with_gpu_graph(sound(tmp_path)), data(tmp_path, {"text": "good", "label": 0}, {"text": "bad", "label": 1})
    assert 0 == verify(path, "--data", lines, "--min-metric", "accuracy=0.01")[0]

    path = with_gpu_graph(sound(tmp_path / "other"), runnable=False)
    code, checks = verify(path, "--data", lines, "--min-metric", "accuracy=0.01")
    assert (1, False, True) == (code, checks["accuracy cuda/fp16"]["passed"], checks["accuracy cpu/fp32"]["passed"])
    edit(path, lambda manifest: manifest.update(graphs=[graph for graph in manifest["graphs"] if graph["provider"] == "cuda"]))
    code, checks = verify(path, "--checkpoint", tmp_path)
    assert (1, False) == (code, checks["parity cuda/fp16"]["passed"])


@pytest.mark.parametrize(("seed", "code"), [(0, 0), (1, 1)])
@pytest.mark.parametrize(
    ("task", "fields", "measure"),
    [
        ("feature-extraction", {}, "cosine"),
        ("text-classification", {"labels": ["score"], "activation": "none"}, "spearman"),
        ("text-classification", {"activation": "sigmoid"}, "set_f1"),
        ("token-classification", {}, "span_f1"),
    ],
)
def test_a_floor_is_for_the_measure_of_the_task(
    tmp_path: Path, verify: Verify, task: str, fields: dict[str, Any], measure: str, seed: int, code: int
) -> None:
    """Vectors and values had no agreement, so that every floor failed them."""
    path = sound(tmp_path, task, other_seed=seed, **fields)
    lines = data(tmp_path, *({"text": text} for text in TEXTS))
    found, checks = verify(path, "--data", lines, "--min-agreement", "0.99")

    metrics = checks["agreement cpu/int8"]["metrics"]
    assert (code, measure) == (found, metrics["measure"])
    assert 0 < metrics["decisions"] <= len(TEXTS)
    assert (metrics["agreement"] >= 0.99) is (code == 0)


def test_equal_but_empty_answers_reach_no_floor(tmp_path: Path, verify: Verify) -> None:
    """A tagger that finds nothing agrees with itself and with texts without entities, which shows nothing."""
    path = sound(tmp_path, "token-classification", other_seed=1, labels=("O", "O", "O", "O"))
    lines = data(tmp_path, *({"text": text, "entities": []} for text in TEXTS))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.01", "--min-metric", "entity-f1=0.5")

    agreement, f1 = checks["agreement cpu/int8"], checks["entity F1 cpu/int8"]
    assert (1, False, False) == (code, agreement["passed"], f1["passed"])
    assert (None, 0, 0.0) == (agreement["metrics"]["agreement"], agreement["metrics"]["decisions"], f1["metrics"]["graph"])
    assert "no input has an entity, and none was found; 0 is shown instead" in f1["detail"]


def test_a_floor_of_label_sets_needs_a_label(tmp_path: Path, verify: Verify) -> None:
    """Micro F1 of no labels at all was 1."""
    path = biased(sound(tmp_path, activation="sigmoid"), -100)
    lines = data(tmp_path, *({"text": text, "label": []} for text in TEXTS))
    code, checks = verify(path, "--data", lines, "--min-metric", "micro-f1=0.5")

    assert (1, {"graph": 0.0}) == (code, checks["micro F1 cpu/fp32"]["metrics"])


def test_two_graphs_in_one_file_are_not_compared_on_a_cpu(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT's fp16 and fp32 graphs are one file, which the CPU runs in float32 for both: they agree by construction."""
    monkeypatch.setattr("bertserve.export.verify.graph_checks.why_not", lambda provider: None if provider == "cpu" else "no driver.")

    def share(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["provider"] = "tensorrt"
        manifest["graphs"] = [graph, graph | {"precision": "fp16", "default": False}]

    path, lines = edit(sound(tmp_path), share), data(tmp_path, {"text": "good"}, {"text": "bad"})
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")

    assert (1, False) == (code, checks["agreement tensorrt/fp16"]["passed"])
    assert "not compared" in checks["agreement tensorrt/fp16"]["detail"]


def biased(path: Path, bias: float) -> Path:
    """Adds a number to all logits of the graph of a bundle, and stores its example again."""
    file = path / "model.cpu.fp32.onnx"
    model = onnx.load(str(file))
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == "bias"]
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + np.float32(bias), "bias"))
    onnx.save(model, str(file))
    edit(path, lambda manifest: manifest["graphs"][0].update(sha256=digest(file)))
    return edit(path, lambda manifest: manifest["example"].update(result=answer(load_bundle(path), manifest["example"]["request"])))


def without_answer_to(word: str, path: Path, file: str) -> Path:
    """Makes the vector of a word NaN in a graph of a bundle."""
    model = onnx.load(str(path / file))
    [words] = [tensor for tensor in model.graph.initializer if tensor.name == "words"]
    values = onnx.numpy_helper.to_array(words).copy()
    values[tiny.VOCABULARY.index(word)] = np.nan
    words.CopyFrom(onnx.numpy_helper.from_array(values, "words"))
    onnx.save(model, str(path / file))

    def put_digest(manifest: dict[str, Any]) -> None:
        for graph in manifest["graphs"]:
            graph["sha256"] = digest(path / graph["file"])

    return edit(path, put_digest)


@pytest.mark.parametrize(("file", "failing"), [("model.cpu.int8.onnx", "cpu/int8"), ("model.cpu.fp32.onnx", "the fp32 graph")])
def test_a_line_without_an_answer_is_a_failed_check(tmp_path: Path, verify: Verify, file: str, failing: str) -> None:
    """Outputs that are not finite on one line: the check says which line it is and whose answer, and the other graphs are measured."""
    path = without_answer_to("dull", sound(tmp_path, other_seed=0), file)
    lines = data(tmp_path, *({"text": text, "label": 0} for text in ["good", "dull", "fine", "very dull !"]))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")

    check = checks["data cpu/int8"]
    assert (1, False) == (code, check["passed"])
    assert f"{failing} has no answer to line 2 of the data, nor to 1 other of 4 inputs: output `logits` is not finite" in check["detail"]
    assert ([2, 4], 4) == (check["metrics"]["unanswered_lines"], check["metrics"]["inputs"])
    assert "agreement cpu/int8" not in checks
    assert ("accuracy cpu/fp32" in checks, "data cpu/fp32" in checks) == ((True, False) if failing == "cpu/int8" else (False, True))


def test_accuracy(tmp_path: Path, verify: Verify) -> None:
    """Labels by name or id; lines without one count for agreement alone."""
    path = sound(tmp_path)
    best = [answer(load_bundle(path), {"inputs": text})[0][0]["label"] for text in TEXTS]
    wrong = next(label for label in tiny.LABELS if label != best[2])
    gold: list[Any] = [best[0], tiny.LABELS.index(best[1]), wrong, [best[3]], None, None]
    lines = data(tmp_path, *({"inputs": text, "label": label} for text, label in zip(TEXTS, gold, strict=True)))
    _, checks = verify(path, "--data", lines)

    assert {"graph": 0.75} == checks["accuracy cpu/fp32"]["metrics"]
    assert "on 4 labeled inputs" in checks["accuracy cpu/fp32"]["detail"]


def test_several_labels_must_all_be_right(tmp_path: Path, verify: Verify) -> None:
    """Of independent labels those from one half on are chosen, and compared as a set."""
    path = edit(sound(tmp_path), lambda manifest: manifest.update(activation="sigmoid"))
    edit(path, lambda manifest: manifest["example"].update(result=answer(load_bundle(path), manifest["example"]["request"])))
    sets = [[item["label"] for item in answer(load_bundle(path), {"inputs": text})[0] if item["score"] >= 0.5] for text in TEXTS]
    assert any(len(labels) != 1 for labels in sets)
    gold = [*sets[:-1], [label for label in tiny.LABELS if label not in sets[-1]]]
    code, checks = verify(path, "--data", data(tmp_path, *({"text": t, "label": g} for t, g in zip(TEXTS, gold, strict=True))))

    assert (0, pytest.approx(5 / 6)) == (code, checks["accuracy cpu/fp32"]["metrics"]["graph"])


def test_a_regression_is_scored_by_its_values(tmp_path: Path, verify: Verify) -> None:
    """Correlation and error with the right values, and the largest difference to the reference."""
    path = regression(tmp_path)
    values = [answer(load_bundle(path), {"inputs": text})[0][0]["score"] for text in TEXTS]
    lines = data(tmp_path, *({"text": text, "label": value + 0.5} for text, value in zip(TEXTS, values, strict=True)))
    _, checks = verify(path, "--data", lines)

    assert pytest.approx(1.0) == checks["Pearson correlation cpu/fp32"]["metrics"]["graph"]
    assert pytest.approx(0.5, abs=1e-5) == checks["mean absolute error cpu/fp32"]["metrics"]["graph"]


def regression(folder: Path, activation: str = "none") -> Path:
    """Writes a tiny bundle of a regression."""
    path = tiny.bundle(folder, "value", labels=("value",), activation=activation)
    edit(path, lambda manifest: manifest["graphs"][0]["evidence"].update(samples=18))
    return edit(path, lambda manifest: manifest["example"].update(result=answer(load_bundle(path), manifest["example"]["request"])))


def test_ranks_of_a_regression(tmp_path: Path, verify: Verify) -> None:
    """Spearman's correlation is 1 where the order is right, however far the values are."""
    path = regression(tmp_path)
    values = [answer(load_bundle(path), {"inputs": text})[0][0]["score"] for text in TEXTS]
    lines = data(tmp_path, *({"text": text, "label": math.exp(5 * value)} for text, value in zip(TEXTS, values, strict=True)))
    _, checks = verify(path, "--data", lines)

    assert pytest.approx(1.0) == checks["Spearman correlation cpu/fp32"]["metrics"]["graph"]
    assert checks["Pearson correlation cpu/fp32"]["metrics"]["graph"] < 0.99


def test_a_metric_without_a_value_says_so(tmp_path: Path, verify: Verify) -> None:
    """0 stands for a correlation with what does not vary, and the report has the reason, of values and of labels."""
    same = [{"text": text, "label": 1} for text in TEXTS]
    _, values = verify(regression(tmp_path), "--data", data(tmp_path, *same))
    _, labels = verify(sound(tmp_path), "--data", data(tmp_path, *same))

    for check, kind in (
        (values["Pearson correlation cpu/fp32"], "value"),
        (values["Spearman correlation cpu/fp32"], "value"),
        (labels["Matthews correlation cpu/fp32"], "label"),
    ):
        assert {"graph": 0.0} == check["metrics"]
        assert f"all right answers are the same {kind}, so there is no correlation; 0 is shown instead" in check["detail"]
    assert "is shown instead" not in labels["accuracy cpu/fp32"]["detail"]


def test_values_through_a_sigmoid_say_so(tmp_path: Path, verify: Verify) -> None:
    """A checkpoint that does not say that it is a regression gives 0 to 1, which is not the scale of right answers up to 5."""
    path = regression(tmp_path, "sigmoid")
    _, five = verify(path, "--data", data(tmp_path, *({"text": text, "label": i} for i, text in enumerate(TEXTS))))
    _, one = verify(path, "--data", data(tmp_path, *({"text": text, "label": i / 5} for i, text in enumerate(TEXTS))))

    for metric in ("Pearson correlation cpu/fp32", "mean absolute error cpu/fp32"):
        assert '"problem_type": "regression"' in five[metric]["detail"]
        assert "problem_type" not in one[metric]["detail"]


@pytest.mark.parametrize(("floor", "code"), [("0.75", 0), ("0.76", 1)])
def test_a_floor_of_a_metric_decides(tmp_path: Path, verify: Verify, floor: str, code: int) -> None:
    """--min-metric passes a graph that reaches it; the metrics without a floor are only said."""
    path = sound(tmp_path)
    best = [answer(load_bundle(path), {"inputs": text})[0][0]["label"] for text in TEXTS[:4]]
    best[2] = next(label for label in tiny.LABELS if label != best[2])
    lines = data(tmp_path, *({"text": text, "label": label} for text, label in zip(TEXTS, best, strict=False)))
    found, checks = verify(path, "--data", lines, "--min-metric", f"accuracy={floor}")

    assert (code, code == 0, None) == (found, checks["accuracy cpu/fp32"]["passed"], checks["macro F1 cpu/fp32"]["passed"])
    assert f"at least {floor} is required" in checks["accuracy cpu/fp32"]["detail"]


def test_a_floor_of_a_metric_that_is_not_there_fails(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that the model does not have, data without right answers, or no graph that runs: nothing was measured, and that is no pass."""
    path = sound(tmp_path)
    labeled, bare = data(tmp_path, {"text": "good", "label": 0}), tmp_path / "bare.jsonl"
    bare.write_text('{"text": "good"}\n', encoding="utf-8")
    for lines, reason in ((labeled, "this model has accuracy, macro F1, Matthews correlation"), (bare, "no line of the data has")):
        code, checks = verify(path, "--data", lines, "--min-metric", "spearman=0.5")
        assert (1, False) == (code, checks["Spearman correlation cpu/fp32"]["passed"])
        assert reason in checks["Spearman correlation cpu/fp32"]["detail"]

    monkeypatch.setattr("bertserve.export.verify.graph_checks.LoadedGraph.load_error", lambda loaded: "it is broken")
    assert False is verify(path, "--data", labeled, "--min-metric", "accuracy=0.5")[1]["accuracy cpu/fp32"]["passed"]


def test_entity_f1(tmp_path: Path, verify: Verify) -> None:
    """Strict, from entities or from tagged words; words are labeled by their first piece where a line does not say."""
    path = sound(tmp_path, "token-classification", other_seed=0)
    text = "good film zq was bad"
    found = answer(load_bundle(path), {"inputs": text, "parameters": {"aggregation_strategy": "first"}})
    assert len(found) >= 2
    entities = [{"start": e["start"], "end": e["end"], "label": e["entity_group"]} for e in found]
    entities[0]["label"] = "WRONG"
    words = text.split()
    tags = ["O"] * len(words)
    _, checks = verify(path, "--data", data(tmp_path, {"text": text, "entities": entities}, {"tokens": words, "tags": tags}))

    expected = 2 * (len(found) - 1) / (2 * len(found) + len(entities))
    assert {"graph": pytest.approx(expected), "reference": pytest.approx(expected)} == checks["entity F1 cpu/int8"]["metrics"]
    assert {"graph": pytest.approx(expected)} == checks["entity F1 cpu/fp32"]["metrics"]
    assert (1.0, 2) == tuple(checks["agreement cpu/int8"]["metrics"][name] for name in ("agreement", "decisions"))


def test_exact_match_and_f1(tmp_path: Path, verify: Verify) -> None:
    """The answer against any of the right ones, in each form that SQuAD's files have."""
    path = sound(tmp_path, "question-answering")
    question, context = "good ?", "the film was great and the book was fine"
    got = answer(load_bundle(path), {"inputs": {"question": question, "context": context}})["answer"]
    line = {"question": question, "context": context}
    right = ([f"The {got}!"], {"text": ["no", got], "answer_start": [0, 0]}, [{"text": got, "answer_start": 0}], ["zq"])
    _, checks = verify(path, "--data", data(tmp_path, *(line | {"answers": answers_} for answers_ in right)))

    assert (0.75, 0.75) == tuple(checks[f"{name} cpu/fp32"]["metrics"]["graph"] for name in ("exact match", "F1"))


def test_questions_without_an_answer_let_the_model_say_so(tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data has such a question every line may be answered with nothing."""
    asked = []
    monkeypatch.setattr(
        "bertserve.export.verify.graph_checks.LoadedGraph.answer",
        lambda self, request: asked.append(request) or {"answer": "", "score": 1.0},
    )
    monkeypatch.setattr("bertserve.export.verify.verify.check_example", lambda loaded: Check("example cpu/fp32", True, ""))
    line = {"question": "good ?", "context": "a film"}
    _, checks = verify(sound(tmp_path, "question-answering"), "--data", data(tmp_path, line | {"answers": ["x"]}, line | {"answers": []}))

    assert [True, True] == [request.parameters.handle_impossible_answer for request in asked]
    assert 0.5 == checks["exact match cpu/fp32"]["metrics"]["graph"]


def test_top_1_of_masks(tmp_path: Path, verify: Verify) -> None:
    """The word of each mask, case and space aside."""
    path = sound(tmp_path, "fill-mask")
    one = answer(load_bundle(path), {"inputs": "a [MASK] film"})[0]["token_str"]
    two = [mask[0]["token_str"] for mask in answer(load_bundle(path), {"inputs": "a [MASK] , [MASK] film"})]
    lines = data(
        tmp_path, {"text": "a [MASK] film", "target": one.upper()}, {"text": "a [MASK] , [MASK] film", "target": [two[0], "nothing"]}
    )
    _, checks = verify(path, "--data", lines)

    assert pytest.approx(2 / 3) == checks["top-1 cpu/fp32"]["metrics"]["graph"]


def test_accuracy_of_choices(tmp_path: Path, verify: Verify) -> None:
    """The right choice by its index or by its text, with a context and without."""
    path = sound(tmp_path, "multiple-choice", other_seed=0)
    line = {"question": "good ?", "choices": ["the film", "a dull book", "neither"]}
    best = [answer(load_bundle(path), {"inputs": inputs})[0]["index"] for inputs in (line, line | {"context": "a"})]
    lines = [
        line | {"label": best[0]},
        line | {"context": "a", "label": line["choices"][best[1]]},
        line | {"label": (best[0] + 1) % 3},
        {"prompt": "good ?", "choices": line["choices"]},
    ]
    _, checks = verify(path, "--data", data(tmp_path, *lines))

    assert {"graph": pytest.approx(2 / 3), "reference": pytest.approx(2 / 3)} == checks["accuracy cpu/int8"]["metrics"]
    assert 1.0 == checks["agreement cpu/int8"]["metrics"]["agreement"]


# ---- usage


@pytest.mark.parametrize(
    ("task", "line", "reason"),
    [
        ("text-classification", "", "has no lines"),
        ("text-classification", "{\n", "line 1 is not JSON"),
        ("text-classification", "[1]\n", "line 1 is not a JSON object"),
        ("text-classification", {"label": "positive"}, "line 1: it has no input"),
        ("text-classification", {"inputs": ["a", "b"]}, "give one input per line"),
        ("text-classification", {"inputs": 5}, "`inputs` is wrong"),
        ("text-classification", {"text": "a", "label": "great"}, "the model has negative, positive, neutral"),
        ("text-classification", {"text": "a", "label": 3}, "`label` is 3"),
        ("text-classification", {"text": "a", "label": True}, "`label` is true"),
        ("text-classification", {"text": "a", "label": [0, 1]}, "`label` has 2 labels, but the labels of the model exclude each other"),
        ("text-classification", {"text": "a", "parameters": {"topk": 1}}, "did you mean `top_k`"),
        ("text-classification", {"text": "a", "parameters": [1]}, "`parameters` must be an object"),
        ("token-classification", {"text": "a", "entities": [{"start": 0}]}, "`entities` must be a list of"),
        ("token-classification", {"text": "a", "tags": ["O"]}, "`tags` need `tokens`"),
        ("token-classification", {"tokens": ["a"], "tags": ["O", "O"]}, "number of `tags` is 2, and of `tokens` 1"),
        ("token-classification", {"tokens": ["a"], "tags": [0]}, "`tags` must be a list of texts"),
        ("token-classification", {"text": "b", "tokens": ["a"], "tags": ["O"]}, 'the token "a" is not in the text'),
        ("question-answering", {"question": "a"}, "`inputs.context` is wrong"),
        ("question-answering", {"question": "a", "context": "b", "answers": "b"}, "`answers` must be a list"),
        ("fill-mask", {"text": "a [MASK]", "target": 5}, "`target` must be a word"),
        ("fill-mask", {"text": "a [MASK]", "target": ["a", "b"]}, "1 mask and 2 words"),
        ("multiple-choice", {"question": "a", "choices": ["b", "c"], "label": 2}, "`label` is 2; it must be one of the 2 choices"),
        ("multiple-choice", {"question": "a", "choices": ["b", "b"], "label": "b"}, "or its index from 0"),
        ("multiple-choice", {"question": "a", "context": "b", "label": 1}, "no `choices`"),
        ("multiple-choice", {"question": "a", "choices": ["b"]}, "must have 2 to 64 choices"),
        ("fill-mask", {"text": "no mask"}, "line 1 of the data cannot be answered"),
    ],
)
def test_data_that_is_not_understood_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, line: Any, reason: str
) -> None:
    """Exit code 2, one line that says where and what."""
    assert 2 == cli.main(["verify", str(sound(tmp_path, task)), "--data", str(data(tmp_path, line))])
    [own] = capsys.readouterr().err.splitlines()
    assert own.startswith("bert-export: ")
    assert reason in own


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ({"text": "good", "lable": 1}, "`lable` (1 line, did you mean `label`?)"),
        ({"tokens": ["good"], "tags": ["O"]}, "`tags` (1 line)"),
        ({"text": "good"}, ""),
    ],
)
def test_data_without_a_right_answer_fails(tmp_path: Path, verify: Verify, line: dict[str, Any], ignored: str) -> None:
    """A typo in the key, data of another task, or no answers: exit code 1, and the ignored keys by name. --min-agreement needs no answers."""
    path = sound(tmp_path, other_seed=0)
    code, checks = verify(path, "--data", data(tmp_path, line))
    assert (1, False, 0) == (code, checks["data"]["passed"], checks["data"]["metrics"]["labeled"])
    assert ignored in checks["data"]["detail"]

    code, checks = verify(path, "--data", data(tmp_path, line), "--min-agreement", "0.5")
    assert (0, None) == (code, checks["data"]["passed"])


def test_labeled_lines_are_counted_and_ignored_keys_named(tmp_path: Path, verify: Verify) -> None:
    """Before the metrics, so that a reader knows what they rest on."""
    lines = data(tmp_path, {"text": "good", "label": 1, "idx": 7}, {"text": "bad", "lable": 0, "idx": 8})
    code, checks = verify(sound(tmp_path), "--data", lines)

    assert (0, None) == (code, checks["data"]["passed"])
    assert {"inputs": 2, "labeled": 1, "ignored_keys": {"idx": 2, "lable": 1}} == checks["data"]["metrics"]
    assert checks["data"]["detail"].startswith("2 lines, 1 with a right answer (`label`); ignored keys: `idx` (2 lines), `lable` (1 line")


@pytest.mark.parametrize("label", ["NaN", "Infinity", "true", "1" + 400 * "0"])
def test_a_value_that_is_no_number_is_a_usage_error(label: str) -> None:
    """Scores of a regression would be none either."""
    read_gold, config = text_classification.TASK.read_gold, SimpleNamespace(labels=("LABEL_0",), activation="none")
    assert read_gold is not None
    with pytest.raises(ValueError, match=f"`label` must be a number, because the model has one label; it is {label}"):
        read_gold({"label": json.loads(label)}, config)  # type: ignore[arg-type]


def test_data_that_is_not_there_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before any check."""
    assert 2 == cli.main(["verify", str(sound(tmp_path)), "--data", str(tmp_path / "none.jsonl")])
    captured = capsys.readouterr()
    assert "none.jsonl" in captured.err
    assert "" == captured.out


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("B", "--min-agreement", "0.5"),
        ("B", "--min-agreement", "2"),
        ("B", "--gold"),
        ("B", "--min-metric", "accuracy=0.5"),
        ("B", "--data", "D", "--min-metric", "accuracy"),
        ("B", "--data", "D", "--min-metric", "accuracy=0.5", "--min-metric", "Accuracy=0.6"),
        ("B", "--data", "D", "--min-metric", "glue=0.5"),
        ("B", "C"),
        ("B", "--precision", "fp8"),
        ("B", "--update"),
        ("B", "--validation", "F"),
        ("B", "--update", "--checkpoint", "C", "--precision", "int8"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(flags: tuple[str, ...]) -> None:
    """Exit code 2 by argparse."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["verify", *flags])

    assert 2 == exit_.value.code


def test_a_line_separator_in_a_text_does_not_end_the_line(tmp_path: Path, verify: Verify) -> None:
    """Only a newline does."""
    _, checks = verify(sound(tmp_path), "--data", data(tmp_path, '{"text": "a\u2028b"}\n\n{"text": "c"}\n'))

    assert 2 == checks["agreement cpu/fp32"]["metrics"]["inputs"]


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint needs torch, exit code 3; without one it is not needed."""
    monkeypatch.setattr("bertserve.export.flags.find_spec", lambda name: None if name == "torch" else importlib.util.find_spec(name))
    path = str(sound(tmp_path))

    assert 0 == cli.main(["verify", path])
    assert 3 == cli.main(["verify", path, "--checkpoint", "x"])
    assert "torch not installed" in capsys.readouterr().err


def test_verifying_without_a_checkpoint_imports_no_torch(tmp_path: Path) -> None:
    """It runs where the service does."""
    code = "import sys; from export import cli; print(cli.main(['verify', sys.argv[1]]), 'torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, sound(tmp_path)], capture_output=True, text=True, check=True)

    assert "0 False False" == result.stdout.splitlines()[-1]


# ---- with the checkpoint


@pytest.fixture(name="exported", scope="module")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and its bundle of fp32 and int8."""
    from bertserve.export.pipeline import ExportSpec, export
    from checkpoints import bert, few_texts

    folder = tmp_path_factory.mktemp("verify")
    source = bert(folder)
    spec = ExportSpec(str(source), folder / "models", precisions=("fp32", "int8"), calibration=few_texts(folder))
    target, _ = export(spec, lambda line: None)
    return source, target


@pytest.mark.torch
def test_a_bundle_passes_against_its_checkpoint(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    """Digest, parity of every graph with the errors of the export, and the agreement on data with PyTorch itself."""
    source, target = exported
    lines = data(tmp_path, *({"text": text, "label": 0} for text in [*TEXTS, "the film was not very good , " * 40]))
    code, checks = verify(target, "--checkpoint", source, "--data", lines)

    graphs = ("cpu/fp32", "cpu/int8")
    order = ["files", "data", *(f"{check} {graph}" for graph in graphs for check in ("validation", "example", "batches")), "checkpoint"]
    order += [f"parity {graph}" for graph in graphs] + [
        f"{check} {graph}" for graph in graphs for check in ("agreement", "accuracy", "macro F1", "Matthews correlation")
    ]
    assert (0, order) == (code, list(checks))
    stored = {graph.precision: graph.evidence for graph in load_bundle(target).manifest.graphs}
    for precision, validation in stored.items():
        metrics = checks[f"parity cpu/{precision}"]["metrics"]
        assert pytest.approx(validation.worst_abs_error, rel=0.05, abs=1e-6) == metrics["worst_abs_error"]
        assert [entry.up_to for entry in validation.lengths] == [entry["up_to"] for entry in metrics["lengths"]]
    assert "the checkpoint" == checks["agreement cpu/int8"]["metrics"]["reference"]
    assert checks["agreement cpu/int8"]["metrics"]["agreement"] >= 6 / 7
    assert 1.0 == checks["agreement cpu/fp32"]["metrics"]["agreement"]
    assert {"graph", "reference"} == set(checks["accuracy cpu/fp32"]["metrics"])


@pytest.mark.torch
def test_a_line_that_the_checkpoint_has_no_answer_to_is_a_failed_check(
    exported: tuple[Path, Path], verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of all graphs have its number, and what was wrong."""
    from bertserve.export.validation.reference import Reference

    class Diverging(Reference):
        def __init__(self, checkpoint: Any, requests: Sequence[Any]) -> None:
            super().__init__(checkpoint, requests)
            if requests[0].text == "fine":
                self.rows[0][0]["logits"][1] = np.nan

    monkeypatch.setattr("bertserve.export.verify.checkpoint_checks.Reference", Diverging)
    lines = data(tmp_path, {"text": "good"}, "\n", {"text": "fine"})
    code, checks = verify(exported[1], "--checkpoint", exported[0], "--data", lines)

    assert 1 == code
    for graph in ("cpu/fp32", "cpu/int8"):
        expected = "the checkpoint has no answer to line 3 of the data: PyTorch's outputs are not finite."
        assert (False, expected) == (checks[f"data {graph}"]["passed"], checks[f"data {graph}"]["detail"])


@pytest.mark.torch
def test_another_checkpoint_fails(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    """Its digest is another, and so are its logits."""
    from checkpoints import bert, edit_weights

    other = bert(tmp_path)
    edit_weights(other, lambda tensors: tensors["classifier.bias"].add_(0.5))
    code, checks = verify(exported[1], "--checkpoint", other)

    assert (1, False, False) == (code, checks["checkpoint"]["passed"], checks["parity cpu/fp32"]["passed"])
    assert "fp32 logits differ by" in checks["parity cpu/fp32"]["detail"]


@pytest.mark.torch
def test_an_older_manifest_is_brought_up_to_date(
    exported: tuple[Path, Path], verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured at export is measured again: tables, errors, arithmetic, and the card is read again; all else, and every other file, stays."""
    source, target = exported
    path = Path(shutil.copytree(target, tmp_path / target.name))
    new = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))

    def age(manifest: dict[str, Any]) -> None:
        manifest["flops"]["linear"] = 1.0
        manifest["source"]["license"] = ["mit"]  # what the checkpoint's card said then
        for graph in manifest["graphs"]:
            graph["evidence"] |= {"lengths": [], "speed": None, "label_agreement": 0.6}

    edit(path, age)
    monkeypatch.setattr("bertserve.export.calibration.BUILT_IN", source.parent / "texts.txt")  # what it was exported with
    code, checks = verify(path, "--checkpoint", source, "--update")

    renewed = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    assert (0, True) == (code, checks["update"]["passed"])
    for manifest in (new, renewed):
        for graph in manifest["graphs"]:
            assert [160] == [entry.pop("length") for entry in graph["evidence"]["speed"].pop("timings")][-1:]
    assert new == renewed
    assert sorted(file.name for file in target.iterdir()) == sorted(file.name for file in path.iterdir())
    assert "median milliseconds of one text" in (path / "README.md").read_text(encoding="utf-8")


@pytest.mark.torch
def test_a_bundle_that_fails_is_not_updated(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    """A validation report of a graph that answers otherwise than its checkpoint would be worthless."""
    from checkpoints import bert, edit_weights

    other = bert(tmp_path)
    edit_weights(other, lambda tensors: tensors["classifier.bias"].add_(0.5))
    before = (exported[1] / MANIFEST_FILE).read_bytes()

    code, checks = verify(exported[1], "--checkpoint", other, "--update")
    assert (1, False, before) == (code, "update" in checks, (exported[1] / MANIFEST_FILE).read_bytes())


@pytest.mark.torch
def test_a_checkpoint_that_cannot_be_loaded_ends_with_1(
    exported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why."""
    (tmp_path / "empty").mkdir()

    assert 1 == cli.main(["verify", str(exported[1]), "--checkpoint", str(tmp_path / "empty")])
    [own] = capsys.readouterr().err.splitlines()
    assert "has no `config.json`" in own


@pytest.mark.torch
@pytest.mark.full_grid
def test_a_folder_called_verify_can_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ./verify, or where the word is not the first."""
    from checkpoints import bert

    bert(tmp_path, "verify")
    monkeypatch.chdir(tmp_path)

    assert 0 == cli.main(["./verify", "--output", "a", "--precision", "fp32"])
    assert 0 == cli.main(["--output", "b", "--precision", "fp32", "verify"])
    assert [True, True] == [load_bundle(tmp_path / folder / "verify").manifest.name == "verify" for folder in ("a", "b")]


# ---- where the checkpoint is from


@pytest.mark.torch
def test_a_revision_of_the_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As --revision of an export; none is the hub's default."""
    from bertserve.export.errors import CheckpointError
    from bertserve.export.verify import checkpoint_checks

    asked: list[Any] = []

    def load(source: str, **options: Any) -> None:
        asked.append((source, options["revision"]))
        raise CheckpointError("not here")

    monkeypatch.setattr(checkpoint_checks, "load_checkpoint", load)
    for flags in ((), ("--revision", "v1")):
        assert 1 == cli.main(["verify", str(sound(tmp_path / str(len(flags)))), "--checkpoint", "org/model", *flags])
    assert [("org/model", None), ("org/model", "v1")] == asked


@pytest.mark.parametrize(
    "flags",
    [
        ("--revision", "v1"),
        ("--trust-module",),
        ("--module", "a.py:make"),
        ("--module", "a.py:make", "--trust-module", "--checkpoint", "."),
        ("--module", "a.py:make", "--trust-module", "--revision", "v1"),
    ],
)
def test_flags_of_a_checkpoint_that_do_not_fit_are_wrong_usage(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A revision is a hub id's, and a module is trusted in so many words."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["verify", str(tmp_path), *flags])
    assert 2 == exit_.value.code
