"""`bert-export verify --data`: agreement with a reference, metrics on labeled data, and invalid data."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

from bertserve.export import cli
from bertserve.export.tasks import text_classification
from support import tiny
from support.bundles import Array, Verify, edit_constant
from support.sound_bundles import FP32, TEXTS, answer, data, sound, store_digests, store_example, with_gpu_graph, without_gpu


def test_agreement_is_measured_against_the_fp32_graph(tmp_path: Path, verify: Verify) -> None:
    """It is the share of inputs for which both graphs have the same best label. Without a minimum it is only reported."""
    path = sound(tmp_path, other_seed=1)
    best = [[answer(path, {"inputs": text}, precision)[0][0]["label"] for text in TEXTS] for precision in ("int8", "fp32")]
    expected = sum(a == b for a, b in zip(*best, strict=True)) / len(TEXTS)
    assert 0 < expected < 1  # 0 or 1 would prove nothing

    code, checks = verify(path, "--data", data(tmp_path, *({"text": text, "label": 0} for text in TEXTS)))
    metrics = checks["agreement cpu/int8"]["metrics"]
    assert (code, checks["agreement cpu/int8"]["passed"]) == (0, None)
    assert "agreement cpu/fp32" not in checks  # it is the baseline
    assert metrics["agreement"] == pytest.approx(expected)
    assert metrics["inputs"] == len(TEXTS)
    assert metrics["reference"] == "the fp32 graph"


def test_only_the_graphs_of_a_precision_are_checked_still_against_the_fp32_graph(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, other_seed=1)
    lines = data(tmp_path, *({"text": text} for text in TEXTS))
    _, all_checks = verify(path, "--data", lines)
    _, checks = verify(path, "--data", lines, "--precision", "int8")

    assert set(checks) == {"files", "data", *(name for name in all_checks if name.endswith(" cpu/int8"))}
    assert checks["agreement cpu/int8"]["metrics"] == all_checks["agreement cpu/int8"]["metrics"]


@pytest.mark.parametrize(("seed", "passed"), [(0, True), (1, False)])
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
    tmp_path: Path, verify: Verify, task: str, fields: dict[str, Any], measure: str, seed: int, passed: bool
) -> None:
    path = sound(tmp_path, task, other_seed=seed, **fields)
    lines = data(tmp_path, *({"text": text} for text in TEXTS))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.99")

    metrics = checks["agreement cpu/int8"]["metrics"]
    assert metrics["measure"] == measure
    assert ("worst_difference" in metrics) is (measure == "spearman")
    assert 0 < metrics["decisions"] <= len(TEXTS)
    assert [metrics["agreement"] >= 0.99, checks["agreement cpu/int8"]["passed"], code == 0] == [passed] * 3


def test_data_has_the_bounds_of_the_export(tmp_path: Path, verify: Verify) -> None:
    """An int8 graph that is far from the fp32 graph fails, unless the export allowed such an error, as in the other tests."""
    path = tiny.edit(sound(tmp_path, other_seed=1), lambda manifest: manifest["graphs"][0]["validation"].update(quantization_limit=0.0))
    code, checks = verify(path, "--data", data(tmp_path, *({"text": text, "label": 0} for text in TEXTS)))

    assert code == 1
    assert not checks["parity cpu/int8"]["passed"]


def test_texts_of_one_kind_do_not_fail_the_bounds(tmp_path: Path, verify: Verify) -> None:
    """The standard deviation of equal texts is 0, so their errors are relative to that of the samples."""
    path = tiny.edit(sound(tmp_path, other_seed=0), lambda manifest: manifest["graphs"][0]["validation"].update(quantization_limit=0.0))
    edit_constant(path / "model.cpu.int8.onnx", "bias", lambda bias: bias + np.float32(1e-4))
    code, checks = verify(store_example(store_digests(path)), "--data", data(tmp_path, *[{"text": "good", "label": 0}] * 100))

    assert (code, checks["agreement cpu/int8"]["metrics"]["decisions"]) == (0, 100)


@without_gpu
def test_a_float_graph_has_the_bounds_of_the_export_on_data(tmp_path: Path, verify: Verify) -> None:
    """The graphs differ in a word that the samples lack, but the data has."""

    def change(words: Array) -> Array:
        words[tiny.VOCABULARY.index("dull")] += 10
        return words

    path = with_gpu_graph(sound(tmp_path))
    edit_constant(path / "model.cuda.fp16.onnx", "words", change)
    code, checks = verify(store_digests(path), "--data", data(tmp_path, {"text": "dull", "label": 0}, {"text": "good", "label": 0}))

    assert code == 1
    assert not checks["parity cuda/fp16"]["passed"]


def test_a_minimum_agreement_needs_a_baseline(tmp_path: Path, verify: Verify) -> None:
    path, lines = sound(tmp_path), data(tmp_path, {"text": "good", "label": 0})
    code, checks = verify(path, "--data", lines)
    assert (code, checks["agreement cpu/fp32"]["passed"]) == (0, None)

    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")
    assert code == 1
    assert "--checkpoint" in checks["agreement cpu/fp32"]["detail"]


@without_gpu
def test_a_graph_that_does_not_run_fails_only_requested_checks(tmp_path: Path, verify: Verify) -> None:
    """If neither its provider nor the CPU can run a graph, the bundle fails only if no graph runs, or a comparison or a minimum was requested."""
    lines, floor = data(tmp_path, {"text": "good", "label": 0}, {"text": "bad", "label": 1}), ("--min-metric", "accuracy=0.01")
    assert verify(with_gpu_graph(sound(tmp_path)), "--data", lines, *floor)[0] == 0
    code, checks = verify(with_gpu_graph(sound(tmp_path / "other"), runnable=False), "--data", lines, *floor)
    assert code == 1
    assert checks["engine cuda/fp16"]["passed"] is False
    assert checks["accuracy cpu/fp32"]["passed"] is True

    path = with_gpu_graph(sound(tmp_path / "only"), runnable=False, only=True)
    code, checks = verify(path, "--data", lines)
    assert code == 1
    assert checks["engine cuda/fp16"]["passed"] is None
    assert checks["graphs"]["passed"] is False
    for flags in (("--data", lines, "--min-agreement", "0.9"), ("--checkpoint", tmp_path)):
        code, checks = verify(path, *flags)
        assert (code, checks["engine cuda/fp16"]["passed"]) == (1, False)


def test_equal_but_empty_results_reach_no_minimum(tmp_path: Path, verify: Verify) -> None:
    """A tagger that finds nothing agrees with itself and with texts without entities, but this proves nothing."""
    path = sound(tmp_path, "token-classification", other_seed=1, labels=("O", "O", "O", "O"))
    lines = data(tmp_path, *({"text": text, "entities": []} for text in TEXTS))
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.01", "--min-metric", "entity-f1=0.5")

    agreement, f1 = checks["agreement cpu/int8"], checks["entity F1 cpu/int8"]
    assert code == 1
    assert agreement["passed"] is False
    assert f1["passed"] is False
    assert agreement["metrics"]["agreement"] is None
    assert agreement["metrics"]["decisions"] == 0
    assert f1["metrics"]["graph"] == 0.0
    assert "instead" in f1["detail"]


@without_gpu
def test_two_graphs_in_one_file_are_not_compared_on_a_cpu(tmp_path: Path, verify: Verify) -> None:
    """TensorRT's fp16 and fp32 graphs share one file, which the CPU always runs in float32, so that they cannot differ."""

    def share(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["provider"] = "tensorrt"
        manifest["graphs"] = [graph, graph | {"precision": "fp16", "default": False}]

    path, lines = tiny.edit(sound(tmp_path), share), data(tmp_path, {"text": "good"}, {"text": "bad"})
    code, checks = verify(path, "--data", lines, "--min-agreement", "0.5")

    assert (code, checks["agreement tensorrt/fp16"]["passed"]) == (1, False)
    assert "not compared" in checks["agreement tensorrt/fp16"]["detail"]


@pytest.mark.parametrize(("file", "failing"), [("model.cpu.int8.onnx", "cpu/int8"), (FP32, "the fp32 graph")])
def test_a_line_without_a_result_fails_the_data_check(tmp_path: Path, verify: Verify, file: str, failing: str) -> None:
    """For outputs that are not finite, the failed check has the lines and the graph. A valid fp32 graph is still measured."""

    def forget(words: Array) -> Array:
        words[tiny.VOCABULARY.index("dull")] = np.nan
        return words

    path = sound(tmp_path, other_seed=0)
    edit_constant(path / file, "words", forget)
    lines = data(tmp_path, *({"text": text, "label": 0} for text in ["good", "dull", "fine", "very dull !"]))
    code, checks = verify(store_digests(path), "--data", lines, "--min-agreement", "0.5")

    check = checks["parity cpu/int8"]
    assert (code, check["passed"]) == (1, False)
    assert check["detail"].startswith(f"{failing} ")
    assert "line 2 " in check["detail"]
    assert "1 other line " in check["detail"]
    assert check["metrics"] == {"inputs": 4, "unanswered_lines": [2, 4]}
    assert "agreement cpu/int8" not in checks
    assert ("accuracy cpu/fp32" in checks) is (failing == "cpu/int8")


def labeled(folder: Path, labels: Sequence[Any]) -> Path:
    return data(folder, *({"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=False)))


def metric(checks: dict[str, Any], name: str) -> Any:
    return checks[f"{name} cpu/fp32"]["metrics"]["graph"]


WORDS = (("the film", "a book"), ("was very", "is not"), ("good .", "bad !", "great , but long"))
FIRST = [" ".join(words) + " poor" * i for i, words in enumerate(product(*WORDS))]
SECOND = [*FIRST[5:], *FIRST[:5]]
# columns of the data, and labels in the order of their ids; RTE and WNLI have the columns of MRPC
GLUE = {
    "CoLA": (("sentence",), ("unacceptable", "acceptable")),
    "MRPC": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "QQP": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "STS-B": (("sentence1", "sentence2"), ("LABEL_0",)),
    "MNLI": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "QNLI": (("question", "sentence"), ("entailment", "not_entailment")),
}


def outputs(path: Path, pairs: Sequence[tuple[str, ...]], labels: Sequence[str]) -> NDArray[np.float64]:
    """Returns the logits of texts or pairs, float64 [texts, labels]."""
    inputs = [dict(zip(("text", "text_pair"), texts, strict=False)) for texts in pairs]
    answers = answer(path, {"inputs": inputs, "parameters": {"function_to_apply": "none"}})
    return np.array([[{item["label"]: item["score"] for item in scores}[label] for label in labels] for scores in answers])


@pytest.mark.parametrize("name", GLUE)
def test_metrics_of_a_glue_task_are_those_of_scikit_learn(tmp_path: Path, verify: Verify, name: str) -> None:
    """Gold labels are the model's predictions with every third label changed; gold values are the ranks of its outputs, shifted."""
    columns, labels = GLUE[name]
    path = sound(tmp_path, labels=labels, activation="none" if len(labels) == 1 else "softmax")
    pairs = [texts[: len(columns)] for texts in zip(FIRST, SECOND, strict=True)]
    logits = outputs(path, pairs, labels)
    if len(labels) == 1:  # 0 to 5 like human ratings, with ties
        values = logits[:, 0]
        gold = np.round(5 * np.roll(values.argsort().argsort(), 1) / (len(values) - 1))
        expected = {"Pearson correlation": stats.pearsonr(gold, values).statistic, "mean absolute error": np.abs(gold - values).mean()}
        expected["Spearman correlation"] = stats.spearmanr(gold, values).statistic
    else:
        predictions = logits.argmax(axis=1)
        gold = np.where(np.arange(len(predictions)) % 3, predictions, (predictions + 1) % len(labels))
        expected = {"accuracy": metrics.accuracy_score(gold, predictions)}
        expected["Matthews correlation"] = metrics.matthews_corrcoef(gold, predictions)
        f1 = metrics.f1_score(gold, predictions, average="binary" if len(labels) == 2 else "macro")
        expected["F1" if len(labels) == 2 else "macro F1"] = f1
    lines = [dict(zip(columns, texts, strict=True)) | {"label": value, "idx": 1} for texts, value in zip(pairs, gold.tolist(), strict=True)]
    code, checks = verify(path, "--data", data(tmp_path, *lines))

    assert code == 0
    for metric_name, value in expected.items():
        assert metric(checks, metric_name) == pytest.approx(value, abs=1e-5)


def test_metrics_of_a_multi_label_model_are_those_of_scikit_learn(tmp_path: Path, verify: Verify) -> None:
    """Accuracy and micro F1 compare the labels with scores of at least 0.5 with the gold labels."""
    labels = ("joy", "anger", "fear", "surprise")
    path = sound(tmp_path, labels=labels, activation="sigmoid", seed=4)
    predictions = outputs(path, [(text,) for text in FIRST], labels) >= 0
    gold = predictions.copy()
    gold[::4, 1] ^= True
    assert {0, 1} < set(gold.sum(axis=1))  # texts with no label, one label and several labels
    lines = [{"text": text, "label": [labels[i] for i in np.flatnonzero(row)]} for text, row in zip(FIRST, gold, strict=True)]
    code, checks = verify(path, "--data", data(tmp_path, *lines), "--min-metric", "micro-f1=0.99")

    assert (code, checks["micro F1 cpu/fp32"]["passed"]) == (1, False)
    assert metric(checks, "micro F1") == pytest.approx(metrics.f1_score(gold, predictions, average="micro"))
    assert metric(checks, "accuracy") == pytest.approx(metrics.accuracy_score(gold, predictions))


@pytest.mark.parametrize(("floor", "passed"), [("0.75", True), ("0.76", False)])
def test_accuracy_is_the_share_of_correct_labels(tmp_path: Path, verify: Verify, floor: str, passed: bool) -> None:
    """Labels are names or ids; lines without a label only count for agreement. `--min-metric` only affects the given metric."""
    path = sound(tmp_path)
    best = [answer(path, {"inputs": text})[0][0]["label"] for text in TEXTS]
    other = next(label for label in tiny.LABELS if label != best[2])
    lines = labeled(tmp_path, [best[0], tiny.LABELS.index(best[1]), other, [best[3]], None, None])
    code, checks = verify(path, "--data", lines, "--min-metric", f"accuracy={floor}")

    assert metric(checks, "accuracy") == 0.75
    assert [checks["accuracy cpu/fp32"]["passed"], code == 0] == [passed, passed]
    assert checks["macro F1 cpu/fp32"]["passed"] is None
    assert all(fact in checks["accuracy cpu/fp32"]["detail"] for fact in ("4 labeled", floor))


def test_an_undefined_correlation_is_explained(tmp_path: Path, verify: Verify) -> None:
    same = labeled(tmp_path, [1] * len(TEXTS))
    _, of_values = verify(sound(tmp_path / "values", labels=("value",), activation="none"), "--data", same)
    _, of_labels = verify(sound(tmp_path), "--data", same)

    for checks, name, kind in (
        (of_values, "Pearson correlation", "value"),
        (of_values, "Spearman correlation", "value"),
        (of_labels, "Matthews correlation", "label"),
    ):
        assert metric(checks, name) == 0.0
        assert f"the same {kind}" in checks[f"{name} cpu/fp32"]["detail"]
    assert "instead" not in of_labels["accuracy cpu/fp32"]["detail"]


@pytest.mark.parametrize("largest", [5, 1])
def test_a_regression_with_a_sigmoid_is_explained(tmp_path: Path, verify: Verify, largest: int) -> None:
    """A checkpoint that is not declared as a regression gives 0 to 1, which does not fit labels up to 5."""
    lines = labeled(tmp_path, [largest * i / 5 for i in range(len(TEXTS))])
    _, checks = verify(sound(tmp_path, labels=("value",), activation="sigmoid"), "--data", lines)

    for name in ("Pearson correlation cpu/fp32", "mean absolute error cpu/fp32"):
        assert ("problem_type" in checks[name]["detail"]) is (largest > 1)


def test_a_minimum_for_a_metric_without_a_value_fails(tmp_path: Path, verify: Verify) -> None:
    """The metric belongs to another task, or the data has no labels. Nothing is measured, so the checks fail, in the order of the flags."""
    path, labeled, flags = sound(tmp_path), {"text": "good", "label": 0}, ("--min-metric", "top-1=0.5", "--min-metric", "spearman=0.5")
    for line, reason in ((labeled, "accuracy, macro F1, Matthews"), ({"text": "good"}, "no line")):
        code, checks = verify(path, "--data", data(tmp_path, line), *flags)
        assert (code, list(checks)[-2:]) == (1, ["top-1 cpu/fp32", "Spearman correlation cpu/fp32"])
        assert [check["passed"] for check in list(checks.values())[-2:]] == [False, False]
        assert reason in checks["Spearman correlation cpu/fp32"]["detail"]


def test_metrics_of_a_calibrated_graph_are_of_raw_scores(tmp_path: Path, verify: Verify) -> None:
    """A bias of -100 would leave no label."""
    path, lines = sound(tmp_path, activation="sigmoid"), labeled(tmp_path, [["negative"]] * len(TEXTS))
    _, raw = verify(path, "--data", lines)
    _, calibrated = verify(tiny.calibrate(path, method="per-label", bias=[-100.0]), "--data", lines)
    assert 0 < metric(raw, "micro F1") == metric(calibrated, "micro F1")
    assert tuple(checks["micro F1 cpu/fp32"]["detail"].partition(" ")[2].removesuffix(" inputs") for checks in (raw, calibrated)) == (
        "on 6 labeled",
        "on raw scores of 6 labeled",
    )


def test_entity_f1_is_computed_from_entities_and_tags(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, "token-classification", other_seed=0)
    text = "good film zq was bad"
    by_piece, by_word = answer(path, {"inputs": text}), answer(path, {"inputs": text, "parameters": {"aggregation_strategy": "first"}})
    assert len(by_piece) > len(by_word) >= 2
    entities = [{"start": e["start"], "end": e["end"], "label": e["entity_group"]} for e in by_piece]
    entities[0]["label"] = "WRONG"
    words = text.split()
    lines = data(tmp_path, {"text": text, "entities": entities}, {"tokens": words, "tags": ["O"] * len(words)})
    _, checks = verify(path, "--data", lines)

    expected = 2 * (len(by_piece) - 1) / (len(by_piece) + len(by_word) + len(entities))
    assert checks["entity F1 cpu/int8"]["metrics"] == {"graph": pytest.approx(expected), "reference": pytest.approx(expected)}
    assert checks["entity F1 cpu/fp32"]["metrics"] == {"graph": pytest.approx(expected)}
    assert tuple(checks["agreement cpu/int8"]["metrics"][name] for name in ("agreement", "decisions")) == (1.0, 2)


def test_correct_answers_are_read_in_each_format_of_squads_files(tmp_path: Path, verify: Verify) -> None:
    """The answer is compared with every correct answer."""
    path = sound(tmp_path, "question-answering")
    line = {"question": "good ?", "context": "the film was great and the book was fine"}
    got = answer(path, {"inputs": line})["answer"]
    right = ([f"The {got}!"], {"text": ["no", got], "answer_start": [0, 0]}, [{"text": got, "answer_start": 0}], ["zq"])
    _, checks = verify(path, "--data", data(tmp_path, *(line | {"answers": answers} for answers in right)))

    assert (metric(checks, "exact match"), metric(checks, "F1")) == (0.75, 0.75)


def test_data_with_unanswerable_questions_allows_no_answer(tmp_path: Path, verify: Verify) -> None:
    """If a line has an empty list of answers, "no answer" is allowed for all lines."""
    line = {"question": "good ?", "context": "a film"}
    path = sound(tmp_path, "question-answering")
    allowed = answer(path, {"inputs": line, "parameters": {"handle_impossible_answer": True}})["answer"]
    _, checks = verify(path, "--data", data(tmp_path, line | {"answers": [allowed]}, line | {"answers": []}))

    assert metric(checks, "exact match") == (1.0 if allowed == "" else 0.5)


def test_top_1_counts_every_mask(tmp_path: Path, verify: Verify) -> None:
    path = sound(tmp_path, "fill-mask")
    texts = ("a [MASK] film", "a [MASK] , [MASK] film")
    one, two = (answer(path, {"inputs": text}) for text in texts)
    targets = (one[0]["token_str"].upper(), [two[0][0]["token_str"], "nothing"])
    lines = ({"text": text, "target": target} for text, target in zip(texts, targets, strict=True))
    _, checks = verify(path, "--data", data(tmp_path, *lines))

    assert metric(checks, "top-1") == pytest.approx(2 / 3)


def test_the_correct_choice_is_given_by_index_or_text(tmp_path: Path, verify: Verify) -> None:
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

    assert checks["accuracy cpu/int8"]["metrics"] == {"graph": pytest.approx(2 / 3), "reference": pytest.approx(2 / 3)}
    assert checks["agreement cpu/int8"]["metrics"]["agreement"] == 1.0


@pytest.mark.parametrize(
    ("task", "line", "reason"),
    [
        ("text-classification", None, "data.jsonl"),
        ("text-classification", "", "no lines"),
        ("text-classification", "{\n", "line 1: the line is not valid JSON"),
        ("text-classification", "text,label\ngood,positive\n", "CSV"),
        ("text-classification", "[1]\n", "line 1: the line is JSON, but not an object"),
        ("text-classification", {"label": "positive"}, "no input; give `inputs`"),
        ("text-classification", {"label": "positive", "txt": "a"}, "`txt`; did you mean `text`?"),
        ("question-answering", {"context": "a", "quesion": "b"}, "`quesion`; did you mean `question`?"),
        ("text-classification", {"inputs": ["a", "b"]}, "is a list"),
        ("text-classification", {"inputs": 5}, "`inputs`"),
        ("text-classification", {"text": "a", "label": "great"}, "negative, positive, neutral"),
        ("text-classification", {"text": "a", "label": True}, "`label` is true"),
        ("text-classification", {"text": "a", "label": [0, 1]}, "2 labels"),
        ("text-classification", {"text": "a", "parameters": {"topk": 1}}, "`top_k`"),
        *(("text-classification", {"text": "a", "parameters": parameters}, "`parameters`") for parameters in ([1], [], 0)),
        ("text-classification", {"text": "a", "hypothesis": "b"}, "`text`, and also `hypothesis`"),
        ("text-classification", {"inputs": "a", "text": "b"}, "`inputs`, and also `text`"),
        ("text-classification", {"premise": "a"}, "`premise`, but no `hypothesis`"),
        *(
            ("token-classification", {"text": "a", "entities": [{"start": 0} | entity]}, "`entities`")
            for entity in ({}, {"end": 1}, {"end": 1.5, "label": "PER"}, {"start": 1, "end": 0, "label": "PER"})
        ),
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
def test_invalid_data_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, line: Any, reason: str) -> None:
    if line is not None:
        data(tmp_path, line)
    assert cli.main(["verify", str(sound(tmp_path, task)), "--data", str(tmp_path / "data.jsonl")]) == 2
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
def test_data_without_labels_fails(tmp_path: Path, verify: Verify, line: dict[str, Any], ignored: str) -> None:
    """A key has a typo, the data are for another task, or answers are missing. Ignored keys are named; `--min-agreement` works."""
    path = sound(tmp_path, other_seed=0)
    code, checks = verify(path, "--data", data(tmp_path, line))
    assert code == 1
    assert checks["data"]["passed"] is False
    assert checks["data"]["metrics"]["labeled"] == 0
    assert ignored in checks["data"]["detail"]

    code, checks = verify(path, "--data", data(tmp_path, line), "--min-agreement", "0.5")
    assert (code, checks["data"]["passed"]) == (0, None)


def test_labeled_lines_are_counted_and_ignored_keys_named(tmp_path: Path, verify: Verify) -> None:
    lines = data(tmp_path, '{"text": "good\u2028", "label": 1, "idx": 7}\n\n', {"text": "bad", "lable": 0, "idx": 8})
    code, checks = verify(sound(tmp_path), "--data", lines)

    assert (code, checks["data"]["passed"]) == (0, None)
    assert checks["data"]["metrics"] == {"inputs": 2, "labeled": 1, "ignored_keys": {"idx": 2, "lable": 1}}
    assert "`idx` (2 lines), `lable` (1 line, did you mean `label`?)" in checks["data"]["detail"]


@pytest.mark.parametrize(
    ("labels", "label", "expected"),
    [
        (("a", "b"), "1", "b"),
        (("1", "2"), '"1"', "1"),
        (("1", "2"), "2", "2"),
        (("1", "2"), "1", None),  # the id of one label and the name of another
        (("True", "False"), "true", "True"),
        (("a", "b"), "true", None),
        *((("LABEL_0",), number, None) for number in ("NaN", "Infinity", "true", "1" + 400 * "0")),  # labels of a regression
    ],
)
def test_a_gold_label_is_a_label_or_its_id(labels: tuple[str, ...], label: str, expected: str | None) -> None:
    read_gold, config = text_classification.EXPORT_TASK.read_gold, SimpleNamespace(labels=labels, activation="softmax")
    if expected is None:
        with pytest.raises(ValueError, match=f"`label` .*{label}"):
            read_gold({"label": json.loads(label)}, config)
    else:
        assert read_gold({"label": json.loads(label)}, config) == {expected}
