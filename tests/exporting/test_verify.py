"""bert-export verify: its checks, its metrics on data, its report and its exit codes. Most tests do not need torch."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import tiny
from bertserve.export import cli
from bertserve.export.tasks import text_classification
from bertserve.service.bundle.files import MANIFEST_FILE, digest, load_bundle
from bertserve.service.engine.sessions import why_not
from bundles import Served, Verify, exported, json_lines

pytest_plugins = ("export_fixtures",)

TEXTS = ["a good film", "a bad book", "very dull !", "the film was not great", "fine", "poor , but short ."]
FP32 = "model.cpu.fp32.onnx"


def answer(path: Path, body: dict[str, Any], precision: str = "auto") -> Any:
    return Served(load_bundle(path), precision).answer(body)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    change(manifest)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return path


def store_digests(path: Path) -> Path:
    def store(manifest: dict[str, Any]) -> None:
        for graph in manifest["graphs"]:
            graph["sha256"] = digest(path / graph["file"])

    return edit(path, store)


def store_example(path: Path) -> Path:
    return edit(path, lambda manifest: manifest["example"].update(result=answer(path, manifest["example"]["request"])))


def sound(folder: Path, task: str = "text-classification", *, other_seed: int | None = None, **fields: Any) -> Path:
    """Writes a tiny bundle that passes all checks, with a validation report and the result of its example.

    Args:
        folder: The models folder.
        task: Its task.
        other_seed: If given, the bundle also has an fp32 graph of this seed, and the default graph, of seed 0, is declared as int8.
        fields: Other fields of the manifest.
    """
    path = tiny.bundle(folder, task, task=task, max_length=160, **fields)

    def complete(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["validation"]["samples"] = 18
        if other_seed is not None:
            (path / FP32).rename(path / "model.cpu.int8.onnx")
            onnx.save(tiny.graph(task, labels=len(manifest["labels"]), seed=other_seed), str(path / FP32))
            other = graph | {"default": False, "sha256": digest(path / FP32)}
            # its bounds allow any difference
            validation = graph["validation"] | {"quantization_limit": 1000.0}
            manifest["graphs"] = [graph | {"file": "model.cpu.int8.onnx", "precision": "int8", "validation": validation}, other]

    return store_example(edit(path, complete))


def regression(folder: Path, activation: str = "none") -> Path:
    return sound(folder, labels=("value",), activation=activation)


def edit_constant(path: Path, file: str, name: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Path:
    """Changes a constant in a graph of a bundle, and the digest in the manifest."""
    model = onnx.load(str(path / file))
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == name]
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))
    onnx.save(model, str(path / file))
    return store_digests(path)


def with_gpu_graph(path: Path, *, runnable: bool = True, only: bool = False) -> Path:
    """Adds a CUDA graph in fp16 to a bundle, or replaces its fp32 graph. The new graph is a copy, or an invalid file."""
    file = path / "model.cuda.fp16.onnx"
    file.write_bytes((path / FP32).read_bytes() if runnable else b"x")

    def add(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        other = {"file": file.name, "sha256": digest(file), "provider": "cuda", "precision": "fp16"}
        other["validation"] = graph["validation"] | {"worst_abs_error": 0.25}
        manifest["graphs"] = [*([] if only else [graph]), graph | other]

    return edit(path, add)


@pytest.fixture(name="no_gpu")
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertserve.export.validation.verify.why_not", lambda provider: None if provider == "cpu" else "no driver.")


def data(folder: Path, *lines: Any) -> Path:
    return json_lines(folder / "data.jsonl", *lines)


def passed(checks: dict[str, Any]) -> dict[str, bool | None]:
    """Returns whether each check passed; None for checks that only report."""
    return {name: check["passed"] for name, check in checks.items()}


# ---- only the bundle


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"])
def test_a_sound_bundle_passes(tmp_path: Path, verify: Verify, task: str) -> None:
    code, checks = verify(sound(tmp_path, task))

    assert (0, ["files", "validation cpu/fp32", "example cpu/fp32", "batches cpu/fp32"]) == (code, list(checks))


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
            {"files": True, "validation cpu/fp32": True, "engine cpu/fp32": False},
            "",
            id="no graph",
        ),
        pytest.param(
            lambda path: edit(path, lambda manifest: manifest["graphs"][0]["validation"].update(samples=0)),
            GRAPH_PASSED | {"validation cpu/fp32": False},
            "",
            id="no validation",
        ),
        pytest.param(
            lambda path: edit(path, lambda manifest: manifest["example"]["result"][0][0].update(score=0.123)),
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

    assert (1, expected) == (code, passed(checks))
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

    assert (1, GRAPH_PASSED | {"batches cpu/fp32": False}) == (code, passed(checks))
    assert checks["batches cpu/fp32"]["metrics"]["worst_row_error"] > 0.01
    assert 0 == verify(edit(path, lambda manifest: manifest["graphs"][0].update(batch_invariant=False)))[0]


@pytest.mark.parametrize("providers", ["cuda", "cpu,tensorrt"])
def test_a_provider_without_a_graph_fails(tmp_path: Path, verify: Verify, providers: str) -> None:
    code, checks = verify(sound(tmp_path), "--provider", providers)

    assert (1, {"files": True, "graphs": False}) == (code, passed(checks))
    assert all(fact in checks["graphs"]["detail"] for fact in (providers.rsplit(",", maxsplit=1)[-1], "cpu/fp32"))


@pytest.mark.usefixtures("no_gpu")
def test_every_graph_is_checked_with_its_validation_report(tmp_path: Path, verify: Verify) -> None:
    """Without its provider, a graph runs on the CPU, as it did at the export, and the report says so. A flag selects graphs."""
    path = with_gpu_graph(sound(tmp_path))
    cuda = {f"{check} cuda/fp16": True for check in ("validation", "example", "batches")}
    code, checks = verify(path)

    assert (0, GRAPH_PASSED | cuda | {"engine cuda/fp16": None}) == (code, passed(checks))
    assert "no driver." in checks["engine cuda/fp16"]["detail"]
    assert "2.5e-01" in checks["validation cuda/fp16"]["detail"]
    assert 18 == checks["validation cuda/fp16"]["metrics"]["samples"]
    assert GRAPH_PASSED == passed(verify(path, "--provider", "cpu")[1])


@pytest.mark.skipif(why_not("cuda") is None, reason="CUDA is there")
def test_a_requested_provider_must_be_available(tmp_path: Path, verify: Verify) -> None:
    code, checks = verify(with_gpu_graph(sound(tmp_path)), "--provider", "cuda")

    assert (1, {"files": True, "validation cuda/fp16": True, "engine cuda/fp16": False}) == (code, passed(checks))
    assert "CUDAExecutionProvider" in checks["engine cuda/fp16"]["detail"]


def test_another_precision_can_give_another_example_result(tmp_path: Path, verify: Verify) -> None:
    """The stored result is the default graph's. A difference in another precision is reported, but is not a failure."""
    _, checks = verify(sound(tmp_path, other_seed=1))

    assert (True, None) == tuple(checks[f"example cpu/{precision}"]["passed"] for precision in ("int8", "fp32"))
    assert "that of int8" in checks["example cpu/fp32"]["detail"]


# ---- data: agreement


def test_agreement_is_measured_against_the_fp32_graph(tmp_path: Path, verify: Verify) -> None:
    """It is the share of inputs for which both graphs have the same best label. Without a minimum it is only reported."""
    path = sound(tmp_path, other_seed=1)
    best = [[answer(path, {"inputs": text}, precision)[0][0]["label"] for text in TEXTS] for precision in ("int8", "fp32")]
    expected = sum(a == b for a, b in zip(*best, strict=True)) / len(TEXTS)
    assert 0 < expected < 1  # 0 or 1 would prove nothing

    code, checks = verify(path, "--data", data(tmp_path, *({"text": text, "label": 0} for text in TEXTS)))
    metrics = checks["agreement cpu/int8"]["metrics"]
    assert (0, None) == (code, checks["agreement cpu/int8"]["passed"])
    assert "agreement cpu/fp32" not in checks  # it is the baseline
    assert (pytest.approx(expected), len(TEXTS), "the fp32 graph") == (metrics["agreement"], metrics["inputs"], metrics["reference"])


@pytest.mark.parametrize(("seed", "code"), [(0, 0), (1, 1)])
@pytest.mark.parametrize(
    ("task", "fields", "measure"),
    [
        ("text-classification", {}, "label"),
        ("feature-extraction", {}, "cosine"),
        ("text-classification", {"labels": ["score"], "activation": "none"}, "spearman"),
        ("text-classification", {"activation": "sigmoid"}, "set_f1"),
        ("token-classification", {}, "span_f1"),
    ],
)
def test_a_minimum_agreement_applies_to_the_measure_of_the_task(
    tmp_path: Path, verify: Verify, task: str, fields: dict[str, Any], measure: str, seed: int, code: int
) -> None:
    path = sound(tmp_path, task, other_seed=seed, **fields)
    lines = data(tmp_path, *({"text": text} for text in TEXTS))
    found, checks = verify(path, "--data", lines, "--min-agreement", "0.99")

    metrics = checks["agreement cpu/int8"]["metrics"]
    assert (code, code == 0, measure) == (found, checks["agreement cpu/int8"]["passed"], metrics["measure"])
    assert 0 < metrics["decisions"] <= len(TEXTS)
    assert (metrics["agreement"] >= 0.99) is (code == 0)


@pytest.mark.parametrize(("limit", "code"), [(1000.0, 0), (0.0, 1)])
def test_data_has_the_bounds_of_the_export(tmp_path: Path, verify: Verify, limit: float, code: int) -> None:
    """An int8 graph that is far from the fp32 graph fails, unless the export allowed such an error."""
    path = edit(sound(tmp_path, other_seed=1), lambda manifest: manifest["graphs"][0]["validation"].update(quantization_limit=limit))
    found, checks = verify(path, "--data", data(tmp_path, *({"text": text, "label": 0} for text in TEXTS)))

    assert (code, code == 0) == (found, checks["parity cpu/int8"]["passed"])


def test_texts_of_one_kind_do_not_fail_the_bounds(tmp_path: Path, verify: Verify) -> None:
    """Outputs of equal texts have no spread, so their errors are relative to the spread of the samples."""
    path = edit(sound(tmp_path, other_seed=0), lambda manifest: manifest["graphs"][0]["validation"].update(quantization_limit=0.0))
    shifted = store_example(edit_constant(path, "model.cpu.int8.onnx", "bias", lambda bias: bias + 1e-4))
    code, checks = verify(shifted, "--data", data(tmp_path, *[{"text": "good", "label": 0}] * 100))

    assert (0, 100) == (code, checks["agreement cpu/int8"]["metrics"]["decisions"])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("shift", "code"), [(1e-3, 0), (10, 1)])
def test_a_float_graph_has_the_bounds_of_the_export_on_data(tmp_path: Path, verify: Verify, shift: float, code: int) -> None:
    """The graphs differ in a word that the samples lack, but the data has."""

    def change(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        words[tiny.VOCABULARY.index("dull")] += shift
        return words

    path = edit_constant(with_gpu_graph(sound(tmp_path)), "model.cuda.fp16.onnx", "words", change)
    found, checks = verify(path, "--data", data(tmp_path, {"text": "dull", "label": 0}, {"text": "good", "label": 0}))

    assert (code, code == 0) == (found, checks["parity cuda/fp16"]["passed"])


def test_a_minimum_agreement_needs_a_baseline(tmp_path: Path, verify: Verify) -> None:
    """With one graph and no checkpoint there is no agreement, which is reported, and fails a minimum."""
    path, lines = sound(tmp_path), data(tmp_path, {"text": "good", "label": 0})
    code, checks = verify(path, "--data", lines)
    assert (0, None) == (code, checks["agreement cpu/fp32"]["passed"])

    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")
    assert 1 == code
    assert "--checkpoint" in checks["agreement cpu/fp32"]["detail"]


@pytest.mark.usefixtures("no_gpu")
def test_a_graph_that_does_not_run_fails_only_requested_checks(tmp_path: Path, verify: Verify) -> None:
    """If neither its provider nor the CPU can run a graph, the bundle does not fail, unless a comparison or a minimum was requested."""
    lines, floor = data(tmp_path, {"text": "good", "label": 0}, {"text": "bad", "label": 1}), ("--min-metric", "accuracy=0.01")
    assert 0 == verify(with_gpu_graph(sound(tmp_path)), "--data", lines, *floor)[0]
    code, checks = verify(with_gpu_graph(sound(tmp_path / "beside"), runnable=False), "--data", lines, *floor)
    assert (1, False, True) == (code, checks["engine cuda/fp16"]["passed"], checks["accuracy cpu/fp32"]["passed"])

    path = with_gpu_graph(sound(tmp_path / "only"), runnable=False, only=True)
    code, checks = verify(path, "--data", lines)
    assert (0, None) == (code, checks["engine cuda/fp16"]["passed"])
    for flags in (("--data", lines, "--min-agreement", "0.9"), ("--checkpoint", tmp_path)):
        code, checks = verify(path, *flags)
        assert (1, False) == (code, checks["engine cuda/fp16"]["passed"])


def test_equal_but_empty_results_reach_no_minimum(tmp_path: Path, verify: Verify) -> None:
    """A tagger that finds nothing agrees with itself and with texts without entities, but this proves nothing."""
    path = sound(tmp_path, "token-classification", other_seed=1, labels=("O", "O", "O", "O"))
    lines = data(tmp_path, *({"text": text, "entities": []} for text in TEXTS))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.01", "--min-metric", "entity-f1=0.5")

    agreement, f1 = checks["agreement cpu/int8"], checks["entity F1 cpu/int8"]
    assert (1, False, False) == (code, agreement["passed"], f1["passed"])
    assert (None, 0, 0.0) == (agreement["metrics"]["agreement"], agreement["metrics"]["decisions"], f1["metrics"]["graph"])
    assert "instead" in f1["detail"]


@pytest.mark.usefixtures("no_gpu")
def test_two_graphs_in_one_file_are_not_compared_on_a_cpu(tmp_path: Path, verify: Verify) -> None:
    """TensorRT's fp16 and fp32 graphs share one file, which the CPU always runs in float32, so that they cannot differ."""

    def share(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["provider"] = "tensorrt"
        manifest["graphs"] = [graph, graph | {"precision": "fp16", "default": False}]

    path, lines = edit(sound(tmp_path), share), data(tmp_path, {"text": "good"}, {"text": "bad"})
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")

    assert (1, False) == (code, checks["agreement tensorrt/fp16"]["passed"])
    assert "not compared" in checks["agreement tensorrt/fp16"]["detail"]


@pytest.mark.parametrize(("file", "failing"), [("model.cpu.int8.onnx", "cpu/int8"), (FP32, "the fp32 graph")])
def test_a_line_without_a_result_fails_the_data_check(tmp_path: Path, verify: Verify, file: str, failing: str) -> None:
    """For outputs that are not finite, the failed check names the first line and the graph. A valid fp32 graph is still measured."""

    def forget(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        words[tiny.VOCABULARY.index("dull")] = np.nan
        return words

    path = edit_constant(sound(tmp_path, other_seed=0), file, "words", forget)
    lines = data(tmp_path, *({"text": text, "label": 0} for text in ["good", "dull", "fine", "very dull !"]))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")

    check = checks["parity cpu/int8"]
    assert (1, False) == (code, check["passed"])
    assert (True, True) == (check["detail"].startswith(f"{failing} "), "line 2 " in check["detail"])
    assert "agreement cpu/int8" not in checks
    assert ("accuracy cpu/fp32" in checks) is (failing == "cpu/int8")


# ---- data: metrics


def labeled(folder: Path, labels: Sequence[Any]) -> Path:
    return data(folder, *({"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=False)))


def metric(checks: dict[str, Any], name: str) -> Any:
    return checks[f"{name} cpu/fp32"]["metrics"]["graph"]


@pytest.mark.parametrize(("floor", "code"), [("0.75", 0), ("0.76", 1)])
def test_accuracy_is_the_share_of_right_labels(tmp_path: Path, verify: Verify, floor: str, code: int) -> None:
    """Labels are names or ids; lines without a label only count for agreement. `--min-metric` only affects the given metric."""
    path = sound(tmp_path)
    best = [answer(path, {"inputs": text})[0][0]["label"] for text in TEXTS]
    wrong = next(label for label in tiny.LABELS if label != best[2])
    lines = labeled(tmp_path, [best[0], tiny.LABELS.index(best[1]), wrong, [best[3]], None, None])
    found, checks = verify(path, "--data", lines, "--min-metric", f"accuracy={floor}")

    assert (0.75, code, code == 0) == (metric(checks, "accuracy"), found, checks["accuracy cpu/fp32"]["passed"])
    assert None is checks["macro F1 cpu/fp32"]["passed"]
    assert all(fact in checks["accuracy cpu/fp32"]["detail"] for fact in ("4 labeled", floor))


def test_an_undefined_correlation_is_explained(tmp_path: Path, verify: Verify) -> None:
    """A correlation with constant values or labels is reported as 0, with the reason."""
    same = labeled(tmp_path, [1] * len(TEXTS))
    _, of_values = verify(regression(tmp_path / "values"), "--data", same)
    _, of_labels = verify(sound(tmp_path), "--data", same)

    for checks, name, kind in (
        (of_values, "Pearson correlation", "value"),
        (of_values, "Spearman correlation", "value"),
        (of_labels, "Matthews correlation", "label"),
    ):
        assert 0.0 == metric(checks, name)
        assert f"the same {kind}" in checks[f"{name} cpu/fp32"]["detail"]
    assert "instead" not in of_labels["accuracy cpu/fp32"]["detail"]


@pytest.mark.parametrize("largest", [5, 1])
def test_a_regression_with_a_sigmoid_is_explained(tmp_path: Path, verify: Verify, largest: int) -> None:
    """A checkpoint that is not declared as a regression gives 0 to 1, which does not fit right answers up to 5."""
    lines = labeled(tmp_path, [largest * i / 5 for i in range(len(TEXTS))])
    _, checks = verify(regression(tmp_path, "sigmoid"), "--data", lines)

    for name in ("Pearson correlation cpu/fp32", "mean absolute error cpu/fp32"):
        assert ("problem_type" in checks[name]["detail"]) is (largest > 1)


def test_a_minimum_for_a_metric_without_a_value_fails(tmp_path: Path, verify: Verify) -> None:
    """The metric belongs to another task, or the data has no right answers. Nothing is measured, so the check fails."""
    path, labeled = sound(tmp_path), {"text": "good", "label": 0}
    for line, reason in ((labeled, "accuracy, macro F1, Matthews"), ({"text": "good"}, "no line")):
        code, checks = verify(path, "--data", data(tmp_path, line), "--min-metric", "spearman=0.5")
        assert (1, False) == (code, checks["Spearman correlation cpu/fp32"]["passed"])
        assert reason in checks["Spearman correlation cpu/fp32"]["detail"]


def test_entity_f1_is_computed_from_entities_and_tags(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, "token-classification", other_seed=0)
    text = "good film zq was bad"
    found = answer(path, {"inputs": text, "parameters": {"aggregation_strategy": "first"}})
    assert len(found) >= 2
    entities = [{"start": e["start"], "end": e["end"], "label": e["entity_group"]} for e in found]
    entities[0]["label"] = "WRONG"
    words = text.split()
    lines = data(tmp_path, {"text": text, "entities": entities}, {"tokens": words, "tags": ["O"] * len(words)})
    _, checks = verify(path, "--data", lines)

    expected = 2 * (len(found) - 1) / (2 * len(found) + len(entities))
    assert {"graph": pytest.approx(expected), "reference": pytest.approx(expected)} == checks["entity F1 cpu/int8"]["metrics"]
    assert {"graph": pytest.approx(expected)} == checks["entity F1 cpu/fp32"]["metrics"]
    assert (1.0, 2) == tuple(checks["agreement cpu/int8"]["metrics"][name] for name in ("agreement", "decisions"))


def test_answers_are_scored_by_exact_match_and_f1(tmp_path: Path, verify: Verify) -> None:
    """The answer is compared with every right answer, in each format of SQuAD's files."""
    path = sound(tmp_path, "question-answering")
    line = {"question": "good ?", "context": "the film was great and the book was fine"}
    got = answer(path, {"inputs": line})["answer"]
    right = ([f"The {got}!"], {"text": ["no", got], "answer_start": [0, 0]}, [{"text": got, "answer_start": 0}], ["zq"])
    _, checks = verify(path, "--data", data(tmp_path, *(line | {"answers": answers} for answers in right)))

    assert (0.75, 0.75) == (metric(checks, "exact match"), metric(checks, "F1"))


def test_data_with_unanswerable_questions_allows_no_answer(tmp_path: Path, verify: Verify) -> None:
    """If a line has an empty list of answers, "no answer" is allowed for all lines."""
    line = {"question": "good ?", "context": "a film"}
    path = sound(tmp_path, "question-answering")
    allowed = answer(path, {"inputs": line, "parameters": {"handle_impossible_answer": True}})["answer"]
    _, checks = verify(path, "--data", data(tmp_path, line | {"answers": [allowed]}, line | {"answers": []}))

    assert (1.0 if allowed == "" else 0.5) == metric(checks, "exact match")


def test_top_1_counts_every_mask(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, "fill-mask")
    texts = ("a [MASK] film", "a [MASK] , [MASK] film")
    one, two = (answer(path, {"inputs": text}) for text in texts)
    targets = (one[0]["token_str"].upper(), [two[0][0]["token_str"], "nothing"])
    lines = ({"text": text, "target": target} for text, target in zip(texts, targets, strict=True))
    _, checks = verify(path, "--data", data(tmp_path, *lines))

    assert pytest.approx(2 / 3) == metric(checks, "top-1")


def test_a_right_choice_is_given_by_index_or_text(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, "multiple-choice", other_seed=0)
    line = {"question": "good ?", "choices": ["the film", "a dull book", "neither"]}
    best = [answer(path, {"inputs": inputs})[0]["index"] for inputs in (line, line | {"context": "a"})]
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
        ("text-classification", "", "no lines"),
        ("text-classification", "{\n", "line 1: the line is not valid JSON"),
        ("text-classification", "[1]\n", "line 1: the line is JSON, but not an object"),
        ("text-classification", {"label": "positive"}, "no input"),
        ("text-classification", {"inputs": ["a", "b"]}, "is a list"),
        ("text-classification", {"inputs": 5}, "`inputs`"),
        ("text-classification", {"text": "a", "label": "great"}, "negative, positive, neutral"),
        ("text-classification", {"text": "a", "label": 3}, "`label` is 3"),
        ("text-classification", {"text": "a", "label": True}, "`label` is true"),
        ("text-classification", {"text": "a", "label": [0, 1]}, "2 labels"),
        ("text-classification", {"text": "a", "parameters": {"topk": 1}}, "`top_k`"),
        ("text-classification", {"text": "a", "parameters": [1]}, "`parameters`"),
        ("token-classification", {"text": "a", "entities": [{"start": 0}]}, "`entities`"),
        ("token-classification", {"text": "a", "tags": ["O"]}, "`tags` need `tokens`"),
        ("token-classification", {"tokens": ["a"], "tags": ["O", "O"]}, "`tags` is 2"),
        ("token-classification", {"tokens": ["a"], "tags": [0]}, "`tags` must be"),
        ("token-classification", {"text": "b", "tokens": ["a"], "tags": ["O"]}, '"a"'),
        ("question-answering", {"question": "a"}, "`inputs.context`"),
        ("question-answering", {"question": "a", "context": "b", "answers": "b"}, "`answers`"),
        ("fill-mask", {"text": "a [MASK]", "target": 5}, "`target`"),
        ("fill-mask", {"text": "a [MASK]", "target": ["a", "b"]}, "1 mask and 2 words"),
        ("multiple-choice", {"question": "a", "choices": ["b", "c"], "label": 2}, "`label` is 2"),
        ("multiple-choice", {"question": "a", "choices": ["b", "b"], "label": "b"}, '`label` is "b"'),
        ("multiple-choice", {"question": "a", "context": "b", "label": 1}, "`choices`"),
        ("multiple-choice", {"question": "a", "choices": ["b"]}, "2 to 64 choices"),
        ("fill-mask", {"text": "no mask"}, "line 1"),
    ],
)
def test_invalid_data_is_a_usage_error_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, line: Any, reason: str
) -> None:
    assert 2 == cli.main(["verify", str(sound(tmp_path, task)), "--data", str(data(tmp_path, line))])
    [own] = capsys.readouterr().err.splitlines()
    assert own.startswith("bert-export: ")
    assert reason in own


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ({"text": "good", "lable": 1}, "`lable` (1 line)"),
        ({"tokens": ["good"], "tags": ["O"]}, "`tags` (1 line)"),
        ({"text": "good"}, ""),
    ],
)
def test_data_without_a_right_answer_fails(tmp_path: Path, verify: Verify, line: dict[str, Any], ignored: str) -> None:
    """A key has a typo, the data are for another task, or answers are missing. Ignored keys are named; `--min-agreement` works."""
    path = sound(tmp_path, other_seed=0)
    code, checks = verify(path, "--data", data(tmp_path, line))
    assert (1, False, 0) == (code, checks["data"]["passed"], checks["data"]["metrics"]["labeled"])
    assert ignored in checks["data"]["detail"]

    code, checks = verify(path, "--data", data(tmp_path, line), "--min-agreement", "0.5")
    assert (0, None) == (code, checks["data"]["passed"])


def test_labeled_lines_are_counted_and_ignored_keys_named(tmp_path: Path, verify: Verify) -> None:
    lines = data(tmp_path, '{"text": "good\u2028", "label": 1, "idx": 7}\n\n', {"text": "bad", "lable": 0, "idx": 8})
    code, checks = verify(sound(tmp_path), "--data", lines)

    assert (0, None) == (code, checks["data"]["passed"])
    assert {"inputs": 2, "labeled": 1, "ignored_keys": {"idx": 2, "lable": 1}} == checks["data"]["metrics"]
    assert "`idx` (2 lines), `lable` (1 line" in checks["data"]["detail"]


@pytest.mark.parametrize("label", ["NaN", "Infinity", "true", "1" + 400 * "0"])
def test_a_value_that_is_not_a_finite_number_is_refused(label: str) -> None:
    read_gold, config = text_classification.TASK.read_gold, SimpleNamespace(labels=("LABEL_0",), activation="none")
    assert read_gold is not None
    with pytest.raises(ValueError, match=f"`label` .* number.*{label}"):
        read_gold({"label": json.loads(label)}, config)


@pytest.mark.parametrize(
    ("labels", "label", "expected"),
    [
        (("0", "1"), 1, "1"),
        (("a", "b"), 1, "b"),
        (("1", "2"), "1", "1"),
        (("1", "2"), 2, "2"),
        (("1", "2"), 1, None),
        (("True", "False"), True, "True"),
        (("0.5", "1.5"), 1.5, "1.5"),
        (("a", "b"), True, None),
    ],
)
def test_a_number_or_truth_value_names_a_label_or_its_id(labels: tuple[str, ...], label: Any, expected: str | None) -> None:
    """A number that is the id of one label and the name of another is refused."""
    read_gold, config = text_classification.TASK.read_gold, SimpleNamespace(labels=labels, activation="softmax")
    assert read_gold is not None
    if expected is None:
        with pytest.raises(ValueError, match="`label` is"):
            read_gold({"label": label}, config)
    else:
        assert {expected} == read_gold({"label": label}, config)


def test_a_missing_data_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == cli.main(["verify", str(sound(tmp_path)), "--data", str(tmp_path / "none.jsonl")])
    captured = capsys.readouterr()
    assert ("none.jsonl" in captured.err, captured.out) == (True, "")


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
        "B --validation F",
        "B --update --checkpoint C --provider cpu",
        "B --revision v1",
        "B --trust-module",
        "B --module a.py:make",
        "B --module a.py:make --trust-module --checkpoint .",
        "B --module a.py:make --trust-module --revision v1",
    ],
)
def test_a_wrong_flag_is_a_usage_error(flags: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["verify", *flags.split()])

    assert 2 == exit_.value.code


def test_a_missing_torch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with a checkpoint needs torch, and ends with exit code 3 without it. Other checks do not need it."""
    monkeypatch.setattr("bertserve.export.flags.find_spec", lambda name: None if name == "torch" else importlib.util.find_spec(name))
    path = str(sound(tmp_path))

    assert 0 == cli.main(["verify", path])
    assert 3 == cli.main(["verify", path, "--checkpoint", "x"])
    assert "bert-export: torch " in capsys.readouterr().err


def test_verifying_without_a_checkpoint_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from bertserve.export import cli; print(cli.main(['verify', sys.argv[1]]), 'torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, sound(tmp_path)], capture_output=True, text=True, check=True)

    assert "0 False False" == result.stdout.splitlines()[-1]


# ---- with the checkpoint


@pytest.fixture(name="exported", scope="module")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from checkpoints import bert, few_texts

    folder = tmp_path_factory.mktemp("verify")
    source = bert(folder)
    return source, exported(source, precisions=("fp32", "int8"), calibration=few_texts(folder)).path


@pytest.fixture(name="other_checkpoint", scope="module")
def checkpoint_with_another_bias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import bert, edit_weights

    source = bert(tmp_path_factory.mktemp("other"))
    edit_weights(source, lambda tensors: tensors["classifier.bias"].add_(0.5))
    return source


@pytest.mark.torch
def test_a_bundle_passes_against_its_checkpoint(exported: tuple[Path, Path], verify: Verify, tmp_path: Path) -> None:
    source, target = exported
    lines = data(tmp_path, *({"text": text, "label": 0} for text in [*TEXTS, "the film was not very good , " * 40]))
    code, checks = verify(target, "--checkpoint", source, "--data", lines)

    graphs = ("cpu/fp32", "cpu/int8")
    order = ["files", "data", *(f"{check} {graph}" for graph in graphs for check in ("validation", "example"))]
    order += ["checkpoint", "settings", *(f"batches {graph}" for graph in graphs)]
    order += [f"{check} {graph}" for graph in graphs for check in ("parity", "agreement", "accuracy", "macro F1", "Matthews correlation")]
    assert (0, order) == (code, list(checks))
    _, without_data = verify(target, "--checkpoint", source)
    for graph in load_bundle(target).manifest.graphs:
        metrics = without_data[f"parity cpu/{graph.precision}"]["metrics"]
        assert pytest.approx(graph.validation.worst_abs_error, rel=0.05, abs=1e-6) == metrics["worst_abs_error"]
        assert [entry.up_to for entry in graph.validation.lengths] == [entry["up_to"] for entry in metrics["lengths"]]
    assert "the checkpoint" == checks["agreement cpu/int8"]["metrics"]["reference"]
    assert checks["agreement cpu/int8"]["metrics"]["agreement"] >= 6 / 7
    assert 1.0 == checks["agreement cpu/fp32"]["metrics"]["agreement"]
    assert {"graph", "reference"} == set(checks["accuracy cpu/fp32"]["metrics"])


@pytest.mark.torch
@pytest.mark.parametrize("flags", [(), ("--data",)])
def test_verify_accepts_an_int8_error_that_the_export_accepted(
    tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """The manifest records `--max-int8-error`, which is here the only bound. Without the record the same graph fails."""
    from checkpoints import bert, few_texts

    monkeypatch.setattr("bertserve.export.validation.comparison.MAX_INT8_RMS", 1e-9)
    monkeypatch.setattr("bertserve.export.validation.comparison.MAX_INT8_WORST", 1e-7)
    monkeypatch.setattr("bertserve.export.validation.comparison.INT8_SLACK", 0)
    source = bert(tmp_path)
    bundle = exported(source, precisions=("int8",), calibration=few_texts(tmp_path), max_int8_error=1.0, quick=True)
    lines = [flag for name in flags for flag in (name, data(tmp_path, *({"text": text} for text in TEXTS * 4)))]

    assert 1.0 == bundle.manifest.graphs[0].validation.quantization_limit
    assert 0 == verify(bundle.path, "--checkpoint", source, *lines)[0]
    edit(bundle.path, lambda manifest: manifest["graphs"][0]["validation"].update(quantization_limit=0.0))
    code, checks = verify(bundle.path, "--checkpoint", source, *lines)
    assert (1, False) == (code, checks["parity cpu/int8"]["passed"])


@pytest.mark.torch
def test_a_line_without_a_result_of_the_checkpoint_fails_the_data_check(
    exported: tuple[Path, Path], verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertserve.export.validation.pytorch import run

    def diverging(checkpoint: Any, request: Any) -> Any:
        rows = run(checkpoint, request)
        return [{"logits": row["logits"] * np.nan} for row in rows] if request.text == "fine" else rows

    monkeypatch.setattr("bertserve.export.validation.pytorch.run", diverging)
    code, checks = verify(exported[1], "--checkpoint", exported[0], "--data", data(tmp_path, {"text": "good"}, "\n", {"text": "fine"}))

    assert 1 == code
    for graph in ("cpu/fp32", "cpu/int8"):
        assert False is checks[f"parity {graph}"]["passed"]
        assert all(fact in checks[f"parity {graph}"]["detail"] for fact in ("the checkpoint ", "line 3 "))


@pytest.mark.torch
@pytest.mark.parametrize("flags", [(), ("--update",)])
def test_another_checkpoint_fails(exported: tuple[Path, Path], other_checkpoint: Path, verify: Verify, flags: tuple[str, ...]) -> None:
    before = (exported[1] / MANIFEST_FILE).read_bytes()
    code, checks = verify(exported[1], "--checkpoint", other_checkpoint, *flags)

    assert (1, False, False) == (code, checks["checkpoint"]["passed"], checks["parity cpu/fp32"]["passed"])
    assert " 5.00e-01, " in checks["parity cpu/fp32"]["detail"]
    assert (False, before) == ("update" in checks, (exported[1] / MANIFEST_FILE).read_bytes())


@pytest.mark.torch
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": ["good", "bad", "so-so"]}, "labels: "),
        ({"activation": "sigmoid"}, "activation: "),
        ({"tokenizer": {"truncation_side": "left"}}, "tokenizer: truncation_side: "),
    ],
)
def test_settings_that_differ_from_the_checkpoints_fail(
    exported: tuple[Path, Path], tmp_path: Path, verify: Verify, change: dict[str, Any], named: str
) -> None:
    """`--update` then writes nothing."""
    source, target = exported
    path = edit(
        Path(shutil.copytree(target, tmp_path / target.name)),
        lambda manifest: [manifest.update({k: manifest[k] | v if isinstance(v, dict) else v}) for k, v in change.items()],
    )
    before = (path / MANIFEST_FILE).read_bytes()
    code, checks = verify(path, "--checkpoint", source, "--update")
    assert (1, False, True) == (code, checks["settings"]["passed"], f" {named}" in checks["settings"]["detail"])
    assert before == (path / MANIFEST_FILE).read_bytes()


@pytest.mark.torch
def test_different_settings_of_embeddings_fail(tmp_path: Path) -> None:
    """The layers and their combination are chosen at the export, so they do not count as differences."""
    from bertserve.export.validation.pytorch import compare_settings, load_checkpoint_of
    from bertserve.export.validation.verify import VerifySpec
    from test_embeddings import encoder, sentence_transformers

    source = sentence_transformers(encoder(tmp_path), "Transformer", "Pooling", "Normalize")
    manifest = exported(source, layers=(-2, -1), combine="mean").manifest
    checkpoint = load_checkpoint_of(manifest, VerifySpec(tmp_path, str(source)))
    assert compare_settings(manifest, checkpoint) is None
    assert manifest.embedding is not None
    for name, value in (("pooling", "max"), ("normalize", False), ("prompts", {"query": "other: "})):
        changed = manifest.model_copy(update={"embedding": manifest.embedding.model_copy(update={name: value})})
        assert str(compare_settings(changed, checkpoint)).startswith(f"embedding: {name}: ")


@pytest.mark.torch
def test_update_measures_everything_again(
    exported: tuple[Path, Path], verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, errors and operations are measured again, and the card is read again. All other fields and files stay the same."""
    source, target = exported
    path = Path(shutil.copytree(target, tmp_path / target.name))

    def age(manifest: dict[str, Any]) -> None:
        manifest["flops"]["linear"] = 1.0
        manifest["source"]["license"] = ["mit"]  # the card's license at the time of the export
        for graph in manifest["graphs"]:
            graph["validation"] |= {"lengths": [], "speed": None, "agreement": None}

    edit(path, age)
    monkeypatch.setattr("bertserve.export.calibration.BUILT_IN", source.parent / "texts.txt")  # the texts of the export
    code, checks = verify(path, "--checkpoint", source, "--update")

    assert (0, True) == (code, checks["update"]["passed"])
    new, renewed = (json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")) for folder in (target, path))
    for manifest in (new, renewed):
        for graph in manifest["graphs"]:
            assert [160] == [entry.pop("length") for entry in graph["validation"]["speed"].pop("timings")][-1:]
    assert new == renewed
    assert sorted(file.name for file in target.iterdir()) == sorted(file.name for file in path.iterdir())
    assert "median milliseconds" in (path / "README.md").read_text(encoding="utf-8")


@pytest.mark.torch
@pytest.mark.full_grid
def test_a_folder_called_verify_can_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints import bert

    bert(tmp_path, "verify")
    monkeypatch.chdir(tmp_path)

    assert 0 == cli.main(["./verify", "--output", "a", "--precision", "fp32"])
    assert 0 == cli.main(["--output", "b", "--precision", "fp32", "verify"])
    assert [True, True] == [load_bundle(tmp_path / folder / "verify").manifest.name == "verify" for folder in ("a", "b")]


@pytest.mark.torch
def test_a_revision_of_the_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bertserve.export.errors import CheckpointError
    from bertserve.export.validation import pytorch

    def load(source: str, *, revision: str, **_: Any) -> None:
        raise CheckpointError(f"not here: {source} {revision}")

    monkeypatch.setattr(pytorch, "load_checkpoint", load)
    assert 1 == cli.main(["verify", str(sound(tmp_path)), "--checkpoint", "org/model", "--revision", "v1"])
    assert "org/model v1" in capsys.readouterr().err
