"""`bert-export calibrate`: the calibrated bundle, and data, aims and bundles that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bertserve.export import cli
from bertserve.service.bundle.decision import Decision
from bertserve.service.bundle.files import load_bundle
from bundles import edit_constant
from sound_bundles import FP32, answer, data, sound, store_digests, store_example, with_gpu_graph

Calibrate = Callable[..., tuple[int, str]]


@pytest.fixture(name="calibrate")
def run_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Calibrate:
    """Returns `calibrate(bundle, *flags)`, which writes to the folder `out` and returns the exit code and what was printed."""

    def run(path: Path, *flags: object) -> tuple[int, str]:
        code = cli.main(["calibrate", str(path), "--output", str(tmp_path / "out"), *map(str, flags)])
        printed = capsys.readouterr()
        return code, printed.err if code else printed.out

    return run


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(tiny.WORDS[:16], size=rng.integers(1, 6))) for _ in range(count)]


def too_sure(path: Path, factor: float = 2.0) -> Path:
    """Multiplies the logits of a bundle's fp32 graph."""
    for name in ("dense", "bias"):
        edit_constant(path / FP32, name, lambda values: values * np.float32(factor))
    return store_example(store_digests(path))


def labeled_by(path: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns texts with labels that are drawn from a bundle's scores."""
    rng, lines = np.random.default_rng(seed), []
    for text in texts(count):
        scores = {item["label"]: item["score"] for item in answer(path, {"inputs": text})[0]}
        chances = np.array([scores[label] for label in tiny.LABELS])
        lines.append({"text": text, "label": str(rng.choice(tiny.LABELS, p=chances / chances.sum()))})
    return lines


def decision_of(path: Path, precision: str = "fp32") -> Decision:
    [decision] = [graph.decision for graph in load_bundle(path).manifest.graphs if graph.precision == precision]
    assert decision is not None
    return decision


def test_the_calibrated_bundle_is_complete_and_recovers_the_temperature(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path)
    lines = data(tmp_path, *labeled_by(path, 1200), {"text": "without a right answer"})
    code, printed = calibrate(
        too_sure(path), "--data", lines, "--aim", "max-error=0.6", "--aim", "positive:recall=0.5", "--aim", "coverage=0.9"
    )
    new = tmp_path / "out" / path.name
    decision = decision_of(new)

    assert 0 == code
    assert (pytest.approx(2, rel=0.2), "temperature", 600, 600) == (decision.temperature, decision.method, decision.fitted, decision.judged)
    assert ["max-error", "recall", "coverage"] == [threshold.aim for threshold in decision.thresholds]
    assert all(item.error <= (0.6 if item.aim == "max-error" else 1 - item.target) for item in decision.thresholds)
    assert (20, 600, 600) == (len(decision.score_counts), sum(decision.score_counts), sum(decision.label_counts.values()))
    assert all(fact in printed for fact in ("temperature", "log_loss", "positive:recall=0.5", str(new)))
    card = (new / "README.md").read_text(encoding="utf-8")
    assert all(fact in card for fact in ("## Calibration", "reliability.cpu.fp32.svg", "coverage=0.9"))
    assert "<svg" in (new / "reliability.cpu.fp32.svg").read_text(encoding="utf-8")
    assert (path / FP32).samefile(new / FP32)
    assert load_bundle(path).version != load_bundle(new).version
    assert 0 == cli.main(["verify", str(new)])
    assert (0, 1) == (
        calibrate(new, "--data", lines, "--overwrite")[0],
        (new / "README.md").read_text(encoding="utf-8").count("## Calibration"),
    )
    assert decision.scale == decision_of(new).scale  # calibrated scores are not calibrated again
    assert 2 == calibrate(new, "--data", lines)[0]  # it exists


def test_each_graph_has_its_own_calibration(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, other_seed=0)
    lines = data(tmp_path, *labeled_by(path, 1000))
    assert 0 == calibrate(too_sure(path), "--data", lines)[0]
    new = tmp_path / "out" / path.name

    assert (pytest.approx(2, rel=0.2), 1.0) == (decision_of(new).temperature, decision_of(new, "int8").temperature)


def test_a_graph_that_cannot_run_here_is_not_calibrated(tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertserve.export.decisions.calibrate.why_not", lambda provider: None if provider == "cpu" else "no driver.")
    path = sound(tmp_path)
    lines = data(tmp_path, *labeled_by(path, 400))
    assert 0 == calibrate(with_gpu_graph(path), "--data", lines)[0]

    assert [True, False] == [graph.decision is not None for graph in load_bundle(tmp_path / "out" / path.name).manifest.graphs]
    only = with_gpu_graph(sound(tmp_path / "only"), only=True)
    assert (1, True) == ((result := calibrate(only, "--data", lines, "--overwrite"))[0], "can run no graph" in result[1])


def test_a_second_file_judges(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path)
    fits, judges = labeled_by(path, 300), data(tmp_path, *labeled_by(path, 200, seed=1)).rename(tmp_path / "judge.jsonl")
    assert 0 == calibrate(too_sure(path), "--data", data(tmp_path, *fits), "--judge", judges)[0]
    decision = decision_of(tmp_path / "out" / path.name)

    assert (300, 200) == (decision.fitted, decision.judged)


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_a_reranker_has_a_scale_and_a_bias(tmp_path: Path, calibrate: Calibrate, activation: str) -> None:
    path = sound(tmp_path, labels=("LABEL_0",), activation=activation)
    rng, lines = np.random.default_rng(0), []
    for text in texts(2400):
        [[item]] = answer(path, {"inputs": {"text": text, "text_pair": "a film"}})
        score = item["score"] if activation == "sigmoid" else 1 / (1 + np.exp(-item["score"]))
        lines.append({"text": text, "text_pair": "a film", "label": int(rng.random() < score)})
    assert 0 == calibrate(too_sure(path), "--data", data(tmp_path, *lines), "--aim", "LABEL_0:recall=0.8")[0]
    decision = decision_of(tmp_path / "out" / path.name)

    assert ("per-label", 1, 1) == (decision.method, len(decision.scale), len(decision.bias))
    assert pytest.approx(0.5, rel=0.3) == decision.scale[0]


def test_entities_are_judged_as_wholes(tmp_path: Path, calibrate: Calibrate) -> None:
    """Entities are correct as often as the scores of the less sure model say."""
    path = sound(tmp_path, "token-classification")
    rng, lines = np.random.default_rng(0), []
    for text in texts(500):
        found = answer(path, {"inputs": text})
        lines.append({"text": text, "entities": [e | {"label": e["entity_group"]} for e in found if rng.random() < e["score"]]})
    lines[0]["entities"] = [{"start": 0, "end": 1, "label": "MISSED"}]
    assert 0 == calibrate(too_sure(path), "--data", data(tmp_path, *lines), "--aim", "max-error=0.9", "--aim", "recall=0.5")[0]
    decision = decision_of(tmp_path / "out" / path.name)

    assert ("tags", pytest.approx(2, rel=0.2)) == (decision.method, decision.temperature)
    assert decision.label_counts.keys() < {
        "PER",
        "LOC",
        "ORG",
        "MISC",
        *(tag.split("-")[-1] for tag in tiny.LABELS_OF["token-classification"]),
        "x",
    }


def test_answers_have_a_power(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, "question-answering")
    rng, lines = np.random.default_rng(0), []
    for text in texts(2200):
        question = {"question": "was it good ?", "context": f"{text} film"}
        found = answer(path, {"inputs": question})
        right = rng.random() < found["score"] ** 0.5
        lines.append(question | {"answers": [found["answer"] if right else "something else"]})
    lines[:200] = [line | {"answers": []} for line in lines[:200]]
    assert 0 == calibrate(path, "--data", data(tmp_path, *lines), "--aim", "max-error=0.9")[0]
    decision = decision_of(tmp_path / "out" / path.name)

    assert ("answers", pytest.approx(0.5, rel=0.4)) == (decision.method, decision.scale[0])
    assert decision.bias[0] != 0
    assert decision.label_counts.keys() <= {"answer", "no answer"}


def flipped(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line | {"label": next(label for label in tiny.LABELS if label != line["label"])} for line in lines]


@pytest.mark.parametrize(
    ("count", "change", "flags", "code", "fact"),
    [
        (99, None, "", 2, "at least 100"),
        (200, lambda line: line | {"label": "neutral"}, "", 2, "same label"),
        (200, lambda line: line | {"parameters": {"top_k": 1}}, "", 2, "`top_k`"),
        (200, None, "--aim other:precision=0.9", 2, "no label `other`"),
        (200, None, "--aim recall=0.9", 2, "`neutral:recall=0.9`"),
        (200, None, "--aim precision=0.999", 1, "no threshold of cpu/fp32 reaches `precision=0.999`"),
    ],
)
def test_data_and_aims_that_cannot_be_used_are_errors(
    tmp_path: Path, calibrate: Calibrate, count: int, change: Any, flags: str, code: int, fact: str
) -> None:
    path = sound(tmp_path)
    lines = data(tmp_path, *(change(line) if change else line for line in labeled_by(path, count)))
    found, printed = calibrate(path, "--data", lines, *flags.split())

    assert (code, True, False) == (found, fact in printed, (tmp_path / "out").exists())
    assert 1 == printed.count("bert-export: ")


def test_a_calibration_that_is_worse_is_refused(tmp_path: Path, calibrate: Calibrate) -> None:
    """The model is right for the examples that fit it, and wrong for the others."""
    path = sound(tmp_path)
    lines = labeled_by(too_sure(path, 4.0), 400)
    judge = data(tmp_path, *flipped(lines)).rename(tmp_path / "judge.jsonl")
    code, printed = calibrate(too_sure(path, 0.25), "--data", data(tmp_path, *lines), "--judge", judge)

    assert (1, True, False) == (code, "log loss worse" in printed, (tmp_path / "out").exists())


def test_a_task_without_decisions_is_refused(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, labels=("a", "b"), activation="none")
    code, printed = calibrate(path, "--data", data(tmp_path, *[{"text": "good"}] * 100))
    assert (2, True) == (code, "at least 100" in printed)
    masked = sound(tmp_path, "fill-mask")
    code, printed = calibrate(masked, "--data", data(tmp_path, *[{"text": "a [MASK]", "target": "good"}] * 100))
    assert (2, True) == (code, "no scores to calibrate" in printed)


@pytest.mark.parametrize("aim", ["precision", "speed=0.9", "precision=1", "precision=x", "positive:coverage=0.9"])
def test_invalid_aims_are_errors_of_usage(capsys: pytest.CaptureFixture[str], aim: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["calibrate", "x", "--data", "x", "--output", "x", "--aim", aim])
    assert (2, True) == (stopped.value.code, "argument --aim" in capsys.readouterr().err)


def test_a_missing_bundle_is_an_error(tmp_path: Path, calibrate: Calibrate) -> None:
    assert (1, True) == ((result := calibrate(tmp_path / "none", "--data", tmp_path / "x"))[0], "not a bundle" in result[1])


def test_the_manifest_is_valid_json_without_special_numbers(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path)
    assert 0 == calibrate(path, "--data", data(tmp_path, *labeled_by(path, 200)))[0]
    json.loads((tmp_path / "out" / path.name / "manifest.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
