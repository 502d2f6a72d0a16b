"""`bert-export calibrate`: the calibrated bundle, and data, aims and bundles that are refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertserve.export import cli
from bertserve.export.model_card import bundle_texts, quote, read_quote
from bertserve.export.score_calibration.calibrate import split
from bertserve.export.validation.labeled_data import LabeledRow
from bertserve.service.bundle.calibration import Calibration
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, load_bundle
from support import tiny
from support.bundles import Service, assert_exit, edit_constant, usage_error
from support.sound_bundles import FP32, data, sound, store_digests, store_example, with_gpu_graph, without_gpu

Calibrate = Callable[..., tuple[int, str]]


@pytest.fixture(name="calibrate")
def run_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Calibrate:
    """Returns `calibrate(bundle, *flags)`, which writes to the folder `out` and returns the exit code and what was printed."""

    def run(path: Path, *flags: object) -> tuple[int, str]:
        code = cli.main(["calibrate", str(path), "--output", str(tmp_path / "out"), *map(str, flags)])
        printed = capsys.readouterr()
        return code, printed.err + printed.out

    return run


def texts(count: int) -> list[str]:
    """Returns different texts."""
    rng, distinct = np.random.default_rng(0), dict[str, None]()
    while len(distinct) < count:
        distinct[" ".join(rng.choice(tiny.WORDS[:16], size=rng.integers(1, 7)))] = None
    return list(distinct)


def too_sure(path: Path, factor: float = 2.0) -> Path:
    """Multiplies the logits of a bundle's fp32 graph."""
    for name in ("dense", "bias"):
        edit_constant(path / FP32, name, lambda values: values * np.float32(factor))
    return store_example(store_digests(path))


def labeled_by(path: Path, count: int) -> list[dict[str, Any]]:
    """Returns texts with labels that are drawn from a bundle's scores."""
    rng, lines, service = np.random.default_rng(0), [], Service(path)
    for text in texts(count):
        scores = {item["label"]: item["score"] for item in service.answer({"inputs": text})[0]}
        chances = np.array([scores[label] for label in tiny.LABELS])
        lines.append({"text": text, "label": str(rng.choice(tiny.LABELS, p=chances / chances.sum()))})
    return lines


def calibration_of(path: Path, precision: str = "fp32") -> Calibration:
    """Returns the calibration of a bundle's graph, and asserts that the manifest is valid JSON, without NaN."""
    json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"), parse_constant=pytest.fail)
    [calibration] = [graph.calibration for graph in load_bundle(path).manifest.graphs if graph.precision == precision]
    assert calibration is not None
    return calibration


@dataclass(frozen=True)
class Calibrated:
    """A bundle whose logits are twice too large, its labeled texts, its calibrated copy, and what the command printed."""

    source: Path
    lines: Path
    path: Path
    printed: str


@pytest.fixture(name="calibrated", scope="module")
def calibrated_bundle(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    folder = tmp_path_factory.mktemp("calibrated")
    source = sound(folder)
    lines = data(folder, *labeled_by(source, 1200), {"text": "without a correct answer"})
    arguments = ["calibrate", str(too_sure(source)), "--output", str(folder / "out"), "--data", str(lines), "--aim", "positive:recall=0.5"]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        assert cli.main(arguments) == 0
    return Calibrated(source, lines, folder / "out" / source.name, printed.getvalue())


def test_a_calibration_recovers_the_temperature_and_meets_the_aim(calibrated: Calibrated) -> None:
    calibration = calibration_of(calibrated.path)

    assert calibration.scale[0] == pytest.approx(0.5, rel=0.2)
    assert calibration.method == "temperature"
    assert calibration.fitted == 600
    assert calibration.tested == 600
    [threshold] = calibration.thresholds
    assert threshold.aim == "recall"
    assert threshold.error <= 0.5
    assert len(calibration.score_counts) == 20
    assert sum(calibration.score_counts) == 600
    assert sum(calibration.label_counts.values()) == 600


def test_the_calibration_is_printed_and_in_the_card(calibrated: Calibrated) -> None:
    facts = ("temperature", "log loss", "positive:recall=0.5", str(calibrated.path), "1 of 1201 lines")
    card = (calibrated.path / CARD_FILE).read_text(encoding="utf-8")

    assert [fact for fact in facts if fact not in calibrated.printed] == []
    assert [fact for fact in ("## Calibration", "reliability.cpu.fp32.svg", "positive:recall=0.5") if fact not in card] == []
    assert "<svg" in (calibrated.path / "reliability.cpu.fp32.svg").read_text(encoding="utf-8")


def test_a_calibrated_bundle_is_a_sound_copy_with_another_version(calibrated: Calibrated) -> None:
    assert load_bundle(calibrated.source).version != load_bundle(calibrated.path).version
    assert cli.main(["verify", str(calibrated.path)]) == 0


def test_a_calibrated_bundle_can_be_calibrated_again(calibrated: Calibrated, tmp_path: Path, calibrate: Calibrate) -> None:
    """Calibrated scores are not calibrated a second time: the new calibration has the same scale."""
    path = tmp_path / "out" / calibrated.path.name
    shutil.copytree(calibrated.path, path)

    assert calibrate(path, "--data", calibrated.lines)[0] == 2  # it exists
    assert calibrate(path, "--data", calibrated.lines, "--overwrite", "--aim", "coverage=0.9")[0] == 0
    assert calibration_of(path).scale == calibration_of(calibrated.path).scale
    [coverage] = calibration_of(path).thresholds
    assert coverage.aim == "coverage"
    assert coverage.error <= 0.1
    card = (path / CARD_FILE).read_text(encoding="utf-8")
    assert card.count("## Calibration") == 1
    assert "coverage=0.9" in card


def test_the_checkpoints_card_is_kept(tmp_path: Path) -> None:
    """Also if it has the headings of a bundle's card, or quotes another card."""
    bundle = load_bundle(tiny.calibrate(sound(tmp_path)))
    card = "# Calibration\n\nIt was calibrated by hand.\n\nThe checkpoint has this card:\n\n## Origin\n\nAnother card."
    readme = bundle_texts(bundle.manifest, bundle.path, quote(card))[CARD_FILE]
    (bundle.path / CARD_FILE).write_text(readme, encoding="utf-8")

    assert readme.endswith(f":\n\n#{card.replace('## Origin', '### Origin')}\n")
    assert readme.count("## Calibration\n") == 2
    assert bundle_texts(bundle.manifest, bundle.path, read_quote(bundle.path / CARD_FILE))[CARD_FILE] == readme


def test_each_graph_has_its_own_calibration(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, other_seed=0)
    lines = data(tmp_path, *labeled_by(path, 1000))
    assert_exit(0, calibrate(too_sure(path), "--data", lines), "needs --aim")
    new = tmp_path / "out" / path.name

    assert (calibration_of(new).scale[0], calibration_of(new, "int8").scale[0]) == (pytest.approx(0.5, rel=0.2), 1.0)


@without_gpu
def test_a_graph_that_cannot_run_here_is_not_calibrated(tmp_path: Path, calibrate: Calibrate) -> None:
    """It does not keep an earlier calibration, whose thresholds are for other aims."""
    path = sound(tmp_path)
    lines = data(tmp_path, *labeled_by(path, 400))
    tiny.calibrate(with_gpu_graph(path))

    def calibrate_all(manifest: dict[str, Any]) -> None:
        for graph in manifest["graphs"]:
            graph["calibration"] = manifest["graphs"][0]["calibration"]

    assert calibrate(tiny.edit(path, calibrate_all), "--data", lines)[0] == 0
    assert [graph.calibration is not None for graph in load_bundle(tmp_path / "out" / path.name).manifest.graphs] == [True, False]
    only = with_gpu_graph(sound(tmp_path / "only"), only=True)
    assert_exit(1, calibrate(only, "--data", lines, "--overwrite"), "no graph")


def test_a_second_file_is_the_test(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path)
    lines = labeled_by(path, 500)
    test = data(tmp_path, *lines[300:]).rename(tmp_path / "test.jsonl")
    assert calibrate(too_sure(path), "--data", data(tmp_path, *lines[:300]), "--test-data", test)[0] == 0
    calibration = calibration_of(tmp_path / "out" / path.name)

    assert (calibration.fitted, calibration.tested) == (300, 200)
    assert_exit(2, calibrate(path, "--data", data(tmp_path, *lines[:301]), "--test-data", test, "--overwrite"), "1 inputs")


def test_copies_of_an_input_are_in_the_same_half(tmp_path: Path, calibrate: Calibrate) -> None:
    """They do not count as more examples, with any labels and any spelling of their input."""
    path = sound(tmp_path)
    lines = labeled_by(path, 150)
    copies = [{"inputs": line["text"], "label": label} for line in lines for label in (line["label"], "neutral")]
    assert_exit(2, calibrate(path, "--data", data(tmp_path, *lines[:60], *copies[:120])), "60 different inputs")
    assert calibrate(path, "--data", data(tmp_path, *lines))[0] == 0
    contradictions = sum(line["label"] != "neutral" for line in lines)
    assert_exit(0, calibrate(path, "--data", data(tmp_path, *lines, *copies), "--overwrite"), f"{contradictions} inputs")

    examples = [LabeledRow(None, line, None, frozenset([line["label"]])) for line in (*lines, *copies)]
    first, second = ({example.text for example in half} for half in split(examples))
    assert len(first) == 75
    assert len(second) == 75
    assert first & second == set()


def test_both_halves_have_the_same_share_of_each_label() -> None:
    counts = {"negative": 90, "neutral": 9, "positive": 41}
    rows = [LabeledRow(None, {"text": f"{label} {i}"}, None, frozenset([label])) for label, count in counts.items() for i in range(count)]
    halves = split(rows)

    assert split(rows) == halves
    for label, count in counts.items():
        assert {sum(example.gold == {label} for example in half) for half in halves} == {count // 2, count - count // 2}


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_a_reranker_has_a_scale_and_a_bias(tmp_path: Path, calibrate: Calibrate, activation: str) -> None:
    path = sound(tmp_path, labels=("LABEL_0",), activation=activation)
    rng, lines, service = np.random.default_rng(0), [], Service(path)
    for text in texts(2400):
        [[item]] = service.answer({"inputs": {"text": text, "text_pair": "a film"}})
        score = item["score"] if activation == "sigmoid" else 1 / (1 + np.exp(-item["score"]))
        lines.append({"text": text, "text_pair": "a film", "label": int(rng.random() < score)})
    assert calibrate(too_sure(path), "--data", data(tmp_path, *lines), "--aim", "LABEL_0:recall=0.8")[0] == 0
    calibration = calibration_of(tmp_path / "out" / path.name)

    assert calibration.method == "per-label"
    assert len(calibration.scale) == 1
    assert len(calibration.bias) == 1
    assert calibration.scale[0] == pytest.approx(0.5, rel=0.3)


def test_entities_are_tested_as_wholes(tmp_path: Path, calibrate: Calibrate) -> None:
    """Entities are correct as often as the scores of the less sure model say."""
    path = sound(tmp_path, "token-classification")
    rng, lines, service = np.random.default_rng(0), [], Service(path)
    for text in texts(300):
        entities = service.answer({"inputs": text})
        lines.append({"text": text, "entities": [e | {"label": e["entity_group"]} for e in entities if rng.random() < e["score"]]})
    lines[0]["entities"] = [{"start": 0, "end": 1, "label": "MISSED"}]
    assert calibrate(too_sure(path), "--data", data(tmp_path, *lines), "--aim", "max-error=0.9")[0] == 0
    calibration = calibration_of(tmp_path / "out" / path.name)

    assert (calibration.method, calibration.scale[0]) == ("tags", pytest.approx(0.5, rel=0.2))
    assert calibration.label_counts.keys() == {"PER"}
    facts = {"PERS:precision=0.5": "no label `PERS`", "coverage=0.9": "exclude each other", "LOC:recall=0.5": "no correct `LOC`"}
    for aim, fact in facts.items():
        assert_exit(2, calibrate(path, "--data", data(tmp_path, *lines[:100]), "--aim", aim, "--overwrite"), fact)


def test_independent_labels_need_the_label_of_an_aim(tmp_path: Path, calibrate: Calibrate) -> None:
    """The labels of one text depend on each other, so they do not count as separate examples."""
    path = sound(tmp_path, activation="sigmoid")
    assert_exit(2, calibrate(path, "--data", data(tmp_path, *labeled_by(path, 200)), "--aim", "max-error=0.9"), ":max-error=0.9`")


def test_answers_have_a_power(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, "question-answering")
    rng, lines, service = np.random.default_rng(0), [], Service(path)
    for text in texts(2200):
        question = {"question": "was it good ?", "context": f"{text} film"}
        prediction = service.answer({"inputs": question})
        correct = rng.random() < prediction["score"] ** 0.5
        lines.append(question | {"answers": [prediction["answer"] if correct else "something else"]})
    lines[:200] = [line | {"answers": []} for line in lines[:200]]
    lines[0]["parameters"] = {"explain": True}
    assert calibrate(path, "--data", data(tmp_path, *lines), "--aim", "max-error=0.9")[0] == 0
    calibration = calibration_of(tmp_path / "out" / path.name)

    assert (calibration.method, calibration.scale[0]) == ("answers", pytest.approx(0.5, rel=0.4))
    assert len(calibration.scale) == 2
    assert calibration.bias[1] != 0
    assert calibration.label_counts.keys() <= {"answer", "no answer"}
    summed = data(tmp_path, *(line | {"parameters": {"duplicates": "sum"}} for line in lines[:200]))
    assert_exit(2, calibrate(path, "--data", summed, "--overwrite"), "`duplicates`")


def test_a_graph_that_fails_is_an_error_with_the_line(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path)
    lines = data(tmp_path, *labeled_by(path, 200))
    edit_constant(path / FP32, "words", lambda words: words[:4])  # the graph then fails for all words
    assert_exit(2, calibrate(store_digests(path), "--data", lines), "line ", "InvalidArgument")

    (path / FP32).write_bytes(b"no graph")
    code, printed = calibrate(store_digests(path), "--data", lines)
    assert (code, printed.count("bert-export: ")) == (1, 1), printed


@pytest.mark.parametrize(
    ("count", "change", "flags", "code", "fact"),
    [
        (99, None, "", 2, "at least 100"),
        (200, lambda line: line | {"label": "neutral"}, "", 2, "same label"),
        (200, lambda line: line | {"parameters": {"decide": True, "threshold": 0.5}}, "", 2, "`decide`"),
        (200, None, "--aim other:precision=0.9", 2, "no label `other`"),
        (200, None, "--aim recall=0.9", 2, "`neutral:recall=0.9`"),
        (200, None, "--aim positive:precision=0.9 --aim neutral:recall=0.9", 2, "exclude each other"),
        (200, None, "--aim max-error=0.6 --aim positive:recall=0.5", 2, "cannot hold together"),
        (200, None, "--aim precision=0.999", 1, "no threshold of cpu/fp32 reaches `precision=0.999`"),
    ],
)
def test_data_and_aims_that_cannot_be_used_are_errors(
    tmp_path: Path, calibrate: Calibrate, count: int, change: Any, flags: str, code: int, fact: str
) -> None:
    path = sound(tmp_path)
    lines = data(tmp_path, *(change(line) if change else line for line in labeled_by(path, count)))
    result = calibrate(path, "--data", lines, *flags.split())

    assert_exit(code, result, fact)
    assert result[1].count("bert-export: ") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parameters", [{"aggregation_strategy": "none"}, {"ignore_labels": ["PER"]}, {"ignore_labels": []}], ids=str)
def test_tags_without_groups_and_other_ignored_labels_are_refused(tmp_path: Path, calibrate: Calibrate, parameters: dict[str, Any]) -> None:
    """They would count as wrong. The strategies that group tokens are accepted."""
    path = sound(tmp_path, "token-classification")
    lines = [{"text": text, "entities": [], "parameters": {"aggregation_strategy": "first"}} for text in texts(110)]
    others = [line | {"parameters": parameters} for line in lines[100:]]
    assert_exit(2, calibrate(path, "--data", data(tmp_path, *lines[:100], *others)), f"`{next(iter(parameters))}`")


def test_a_label_of_a_reranker_is_0_or_1(tmp_path: Path, calibrate: Calibrate) -> None:
    path = sound(tmp_path, labels=("LABEL_0",), activation="sigmoid")
    lines = [{"text": text, "text_pair": "a film", "label": i % 2} for i, text in enumerate(texts(200))]
    lines[2]["label"] = 0.5
    assert_exit(2, calibrate(path, "--data", data(tmp_path, *lines)), "line 3 ", "`label` is 0.5")


def test_a_calibration_that_is_worse_is_refused(tmp_path: Path, calibrate: Calibrate) -> None:
    """The model is correct for the examples that fit it, and wrong for the others."""
    path = sound(tmp_path)
    lines = labeled_by(too_sure(path, 4.0), 400)
    errors = [line | {"label": next(label for label in tiny.LABELS if label != line["label"])} for line in lines[200:]]
    test = data(tmp_path, *errors).rename(tmp_path / "test.jsonl")

    assert_exit(1, calibrate(too_sure(path, 0.25), "--data", data(tmp_path, *lines[:200]), "--test-data", test), "log loss")
    assert not (tmp_path / "out").exists()


def test_calibrating_and_verifying_import_no_torch(tmp_path: Path) -> None:
    path = sound(tmp_path)
    calibrating = ["calibrate", str(path), "--data", str(data(tmp_path, *labeled_by(path, 200))), "--output", str(tmp_path / "out")]
    commands = [calibrating, ["verify", str(path)]]
    code = (
        f"import sys; from bertserve.export import cli; print(*map(cli.main, {commands}), {{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "0 0 set()"


def test_a_task_without_scores_is_refused(tmp_path: Path, calibrate: Calibrate) -> None:
    for path in (sound(tmp_path, labels=("a", "b"), activation="none"), sound(tmp_path, "fill-mask")):
        assert_exit(2, calibrate(path, "--data", data(tmp_path, {"text": "a [MASK]"})), "no scores to calibrate")


@pytest.mark.parametrize("aim", ["precision", "speed=0.9", "precision=1", "precision=x", "positive:coverage=0.9"])
def test_invalid_aims_are_errors_of_usage(capsys: pytest.CaptureFixture[str], aim: str) -> None:
    assert "argument --aim" in usage_error(capsys, "calibrate", "x", "--data", "x", "--output", "x", "--aim", aim)


def test_a_missing_bundle_is_an_error(tmp_path: Path, calibrate: Calibrate) -> None:
    assert_exit(1, calibrate(tmp_path / "none", "--data", tmp_path / "x"), str(tmp_path / "none"))
