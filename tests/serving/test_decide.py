"""Calibrated scores, thresholds and decisions, and the counts from which drift is computed."""

import asyncio
import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertserve.service.auth import Authenticator
from bertserve.service.bundle import files
from bertserve.service.check import check
from bertserve.service.cli import main
from bertserve.service.settings import Settings
from support import metric, tiny
from support.app_client import call, error_of, error_of_inputs, keys, post, result, result_of, serving, state_of
from support.scored import read_rows

TEXTS = ["a good film", "dull", "very bad , not fine", "the book was poor but good"]
LONG = " ".join(["good", "film", "dull"] * 20)


@pytest.fixture(name="raw", scope="module")
def raw_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.every_kind(tmp_path_factory.mktemp("raw"))


@pytest.fixture(name="calibrated", scope="module")
def calibrated_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the models folder of `raw`, with calibrations."""
    folder = tiny.every_kind(tmp_path_factory.mktemp("calibrated"))
    tiny.calibrate(folder / "classifier", {"threshold": 0.57})
    tiny.calibrate(folder / "nli", {"threshold": 0.2, "aim": "coverage"})
    tiny.calibrate(folder / "names", {"threshold": 0.4}, method="tags")
    tiny.calibrate(folder / "passages", {"threshold": 0.1}, method="answers", bias=[0.0, -1.0])
    tiny.calibrate(folder / "ranker", {"threshold": 0.5, "label": "LABEL_0"}, method="per-label", bias=[0.5])
    return folder


def scores_of(answer: list[dict[str, Any]]) -> dict[str, float]:
    return {item["label"]: item["score"] for item in answer}


@pytest.mark.parametrize("window", [None, "mean", "max"])
def test_scores_are_calibrated_and_their_order_stays(raw: Path, calibrated: Path, window: str | None) -> None:
    """By default; `calibrated` set to false gives the raw scores. A list, a pair and windows get them too, combined before calibration."""
    inputs = [*TEXTS, {"text": "good", "text_pair": "a book"}, LONG]
    body = {"inputs": inputs, "parameters": {"window": window}}
    before, after = result(raw, "/models/classifier", **body), result(calibrated, "/models/classifier", **body)
    assert result(calibrated, "/models/classifier", inputs=inputs, parameters={"window": window, "calibrated": False}) == before
    for old, new in zip(before, after, strict=True):
        assert [item["label"] for item in new] == [item["label"] for item in old]
        powers = np.array([item["score"] for item in old]) ** 0.5  # a temperature of 2
        assert [item["score"] for item in new] == pytest.approx((powers / powers.sum()).tolist(), abs=1e-6)


def test_rounding_does_not_change_the_order(tmp_path: Path) -> None:
    """A calibration that makes several scores 0 keeps the order of the raw scores."""
    path = tiny.bundle(tmp_path, labels=("a", "b", "c", "d", "e"), seed=3)
    tiny.calibrate(path, scale=[2000.0])
    answer, raw = result_of(tmp_path, "/classify", TEXTS), result_of(tmp_path, "/classify", TEXTS, calibrated=False)
    assert [list(scores_of(item)) for item in answer] == [list(scores_of(item)) for item in raw]
    assert all(item[-1]["score"] == item[-2]["score"] == 0 for item in answer)


def test_an_explanation_is_about_the_calibrated_score(calibrated: Path) -> None:
    [[best, *_]] = result(calibrated, "/models/classifier", inputs="good film", parameters={"explain": True})
    [[without, *others]] = result(calibrated, "/models/classifier", inputs="good")
    score = scores_of([without, *others])[best["label"]]
    assert best["explanation"][1]["importance"] == pytest.approx(best["score"] - score, abs=1e-6)


@pytest.mark.parametrize("function", ["none", "sigmoid", "softmax"])
def test_other_scores_are_not_calibrated(raw: Path, calibrated: Path, function: str) -> None:
    body = {"inputs": TEXTS, "parameters": {"function_to_apply": function}}
    assert result(calibrated, "/models/classifier", **body) == result(raw, "/models/classifier", **body)


@pytest.mark.parametrize(
    ("path", "inputs", "parameters", "word"),
    [
        ("/models/classifier", "good", {"calibrated": True}, "bert-export calibrate"),
        ("/models/classifier", "good", {"threshold": 0.5}, "`decide`"),
        ("/models/classifier", "good", {"decide": True, "threshold": "high"}, "a number or an object"),
        ("/models/classifier", "good", {"decide": True, "threshold": {"positive": "high"}}, r"parameters\.threshold\.positive"),
        ("/models/classifier", "good", {"decide": True, "threshold": 1.5}, r"`threshold` is 1\.5"),
        ("/models/classifier", "good", {"decide": True, "threshold": {"neutral": 0.5, "positive": -0.5}}, r"`threshold` is -0\.5"),
        ("/models/classifier", "good", {"decide": True, "min_confidence": 50, "function_to_apply": "sigmoid"}, "`min_confidence` is 50"),
        ("/models/classifier", "good", {"decide": True, "threshold": {}}, "threshold"),
        ("/ner", "good", {"decide": True, "threshold": {"O": 0.5}}, "threshold"),
        ("/ner", "good", {"decide": True, "threshold": {"PER": 0.5}, "ignore_labels": ["PER"]}, "threshold"),
        ("/answer", {"question": "a", "context": "b"}, {"decide": True, "threshold": {"answer": 0.5}}, "threshold"),
        # the error of a parameter names no input
        ("/models/classifier", ["good", "dull"], {"decide": True}, "^parameters: .*bert-export calibrate"),
        ("/models/classifier", "good", {"decide": True, "threshold": {"good": 0.5}}, "^parameters: .*positive"),
        ("/answer", {"question": "a", "context": "b"}, {"max_seq_len": 500}, "^parameters: .*`max_seq_len`"),
        ("/fill-mask", "a [MASK]", {"targets": [" "]}, "^parameters: .*`targets`"),
        ("/zero-shot", "good", {"candidate_labels": ["film " * 40]}, "^parameters: .*`hypothesis_template`"),
    ],
)
def test_wrong_and_ineffective_parameters_are_errors(raw: Path, path: str, inputs: Any, parameters: dict[str, Any], word: str) -> None:
    assert re.search(word, error_of_inputs(raw, path, inputs, **parameters))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/classifier", {"inputs": "good", "parameters": {"function_to_apply": "none"}}),
        ("/rerank", {"query": "good film", "texts": TEXTS, "raw_scores": True, "parameters": {}}),
        ("/answer", {"inputs": {"question": "good?", "context": LONG}, "parameters": {"duplicates": "sum"}}),
    ],
)
def test_logits_and_sums_can_have_any_threshold(raw: Path, path: str, body: dict[str, Any]) -> None:
    body["parameters"] |= {"decide": True, "threshold": -50.0, "min_confidence": 50.0}
    decisions = result(raw, path, **body)
    assert "`min_confidence` 50" in (decisions[0] if isinstance(decisions, list) else decisions)["reason"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"calibrated": False, "decide": True},
        {"function_to_apply": "sigmoid", "decide": True},
        {"function_to_apply": "none", "calibrated": True},
    ],
)
def test_raw_scores_have_no_thresholds_of_the_bundle(calibrated: Path, parameters: dict[str, Any]) -> None:
    assert post(calibrated, {"inputs": "good", "parameters": parameters}, path="/models/classifier").status_code == 422


def test_the_best_label_is_the_decision_if_its_score_reaches_its_threshold(calibrated: Path) -> None:
    """The threshold of the bundle applies. A threshold in the request replaces them, and a minimum is added."""
    plain = result(calibrated, "/models/classifier", inputs=TEXTS)
    decisions = result(calibrated, "/models/classifier", inputs=TEXTS, parameters={"decide": True})
    assert [item["scores"] for item in decisions] == plain
    assert {item["abstained"] for item in decisions} == {True, False}
    for answer, item in zip(plain, decisions, strict=True):
        assert item["decision"] == (answer[0]["label"] if answer[0]["score"] >= 0.57 else None)
        assert item["abstained"] == (item["decision"] is None) == (item["reason"] is not None)
        assert not item["abstained"] or {f"{answer[0]['score']:g}", "0.57"} <= set(item["reason"].split())


@pytest.mark.parametrize(
    ("parameters", "least"),
    [
        ({"threshold": 0.99}, "threshold 0.99"),
        ({"threshold": {"negative": 0.98}}, "threshold 0.98"),
        ({"min_confidence": 0.97}, "`min_confidence` 0.97"),
    ],
)
def test_the_reason_has_the_score_and_what_it_did_not_reach(calibrated: Path, parameters: dict[str, Any], least: str) -> None:
    [[best, *_]] = result(calibrated, "/models/classifier", inputs=TEXTS[:1])
    [item] = result(calibrated, "/models/classifier", inputs=TEXTS[:1], parameters={"decide": True} | parameters)
    assert f"{best['score']:g}" in item["reason"]
    assert least in item["reason"]


@pytest.mark.parametrize("name", ["threshold", "min_confidence"])
def test_a_reason_distinguishes_a_score_from_a_threshold_close_to_it(raw: Path, name: str) -> None:
    [[best, *_]] = result(raw, "/models/classifier", inputs=TEXTS[:1])
    [item] = result(raw, "/models/classifier", inputs=TEXTS[:1], parameters={"decide": True, name: best["score"] + 1e-9})
    score, least = (float(word) for word in item["reason"].split() if word[0].isdigit())
    assert score < least


def test_a_minimum_keeps_the_thresholds_of_the_bundle(calibrated: Path) -> None:
    plain = {"inputs": TEXTS, "parameters": {"decide": True}}
    low = {"inputs": TEXTS, "parameters": {"decide": True, "min_confidence": 0.0}}
    assert result(calibrated, "/models/classifier", **low) == result(calibrated, "/models/classifier", **plain)
    [item] = result(calibrated, "/models/nli", inputs=["good"], parameters={"decide": True, "min_confidence": 0.0})
    assert isinstance(item["decision"], list)
    [item] = result(calibrated, "/models/nli", inputs=["good"], parameters={"decide": True, "min_confidence": 1.0})
    assert item["decision"] is None


def test_a_label_with_a_threshold_is_chosen_if_its_score_reaches_it(raw: Path) -> None:
    """Even if another label has a better score; if no such label reaches its own, the best label without one is chosen."""
    [answer] = result(raw, "/models/classifier", inputs=TEXTS[:1])
    best, second, _ = answer

    def decision(**threshold: float) -> Any:
        [item] = result(raw, "/models/classifier", inputs=TEXTS[:1], parameters={"decide": True, "threshold": threshold})
        return item["decision"]

    assert decision(**{second["label"]: second["score"] - 1e-3}) == second["label"]
    assert decision(**{second["label"]: second["score"] + 1e-3}) == best["label"]
    assert decision(**{best["label"]: best["score"] + 1e-3}) is None


def test_coverage_gives_sets_of_labels(calibrated: Path) -> None:
    [answer] = result(calibrated, "/models/nli", inputs=["good"])
    [item] = result(calibrated, "/models/nli", inputs=["good"], parameters={"decide": True})
    assert item["decision"] == [label["label"] for label in answer if label["score"] >= 0.2]


def test_the_threshold_of_a_label_does_not_change_sets(tmp_path: Path) -> None:
    """Otherwise a correct label could be missing."""
    path = tiny.bundle(tmp_path)
    tiny.calibrate(path, {"threshold": 0.0, "aim": "coverage"}, {"threshold": 1.0, "label": "positive"})
    [item] = result_of(tmp_path, "/classify", ["good"], decide=True)
    assert sorted(item["decision"]) == sorted(tiny.LABELS)


def test_independent_labels_are_decided_one_by_one(tmp_path: Path) -> None:
    """The decision is a list, which can be empty. `top_k` limits only the scores; each label can have its own calibration."""
    path = tiny.bundle(tmp_path, activation="sigmoid")
    tiny.calibrate(path, {"threshold": 0.9, "label": "neutral"}, method="per-label", scale=[0.5, 1.0, 2.0], bias=[3.0, -3.0, 0.0])
    raw = scores_of(result_of(tmp_path, "/classify", "good", calibrated=False)[0])
    [item] = result_of(tmp_path, "/classify", "good", decide=True, top_k=1)
    [answer] = result_of(tmp_path, "/classify", "good")
    odds = np.log(np.array([raw[label] for label in tiny.LABELS])) - np.log1p(-np.array([raw[label] for label in tiny.LABELS]))
    expected = 1 / (1 + np.exp(-(odds * [0.5, 1, 2] + [3, -3, 0])))
    assert scores_of(answer) == pytest.approx(dict(zip(tiny.LABELS, expected.tolist(), strict=True)), abs=1e-5)
    assert sorted(answer, key=lambda label: -label["score"]) == answer
    least = {"neutral": 0.9}
    assert item["decision"] == [label["label"] for label in answer if label["score"] >= least.get(label["label"], 0.5)]
    assert len(item["scores"]) == 1
    assert item["abstained"] is False
    assert result_of(tmp_path, "/classify", "good", decide=True, threshold=1.0)[0]["decision"] == []
    assert result_of(tmp_path, "/classify", "good", decide=True, min_confidence=1.0)[0]["decision"] is None


def test_entities_below_the_threshold_are_left_out_and_counted(raw: Path, calibrated: Path) -> None:
    text = "the film was good and a book very dull"
    plain, before = result(calibrated, "/ner", inputs=text), result(raw, "/ner", inputs=text)
    assert [item["word"] for item in before] == [item["word"] for item in plain]
    assert [item["score"] for item in plain] < [item["score"] for item in before]
    least = sorted(item["score"] for item in plain)[1]
    entities = [item for item in plain if item["score"] >= least]
    item = result(calibrated, "/ner", inputs=text, parameters={"decide": True, "threshold": least})
    assert {
        "decision": list(dict.fromkeys(entity["entity_group"] for entity in entities)),
        "scores": entities,
        "left_out": len(plain) - len(entities),
    }.items() <= item.items()
    per_label = result(calibrated, "/ner", inputs=[text], parameters={"decide": True, "threshold": {"PER": 1.0}})
    assert per_label[0]["scores"] == [entity for entity in plain if entity["entity_group"] != "PER"]
    nothing = result(calibrated, "/ner", inputs="", parameters={"decide": True})
    assert {"decision": [], "abstained": False, "left_out": 0}.items() <= nothing.items()


def test_a_minimum_counts_entities_that_are_left_out(calibrated: Path) -> None:
    parameters = {"decide": True, "threshold": 1.0, "min_confidence": 0.99}
    item = result(calibrated, "/ner", inputs="the film was good", parameters=parameters)
    assert (item["scores"], item["decision"], item["abstained"]) == ([], None, True)
    assert item["left_out"] > 0
    assert "min_confidence" in item["reason"]


@pytest.mark.parametrize(("strategy", "known_label", "unknown"), [("simple", "PER", "B-PER"), ("none", "B-PER", "PER")])
def test_thresholds_have_the_names_of_the_strategy(calibrated: Path, strategy: str, known_label: str, unknown: str) -> None:
    """A threshold of another name would have no effect."""
    statuses = [
        post(
            calibrated,
            {"inputs": "good", "parameters": {"aggregation_strategy": strategy, "decide": True, "threshold": {name: 0.5}}},
            path="/ner",
        ).status_code
        for name in (known_label, unknown)
    ]
    assert statuses == [200, 422]


def test_answers_are_decided_by_the_best_one(raw: Path, calibrated: Path) -> None:
    """A calibration keeps the order of answers, and moves "no answer" by its offset."""
    body = {"inputs": {"question": "good?", "context": LONG}, "parameters": {"top_k": 5, "handle_impossible_answer": True}}
    before, after = result(raw, "/answer", **body), result(calibrated, "/answer", **body)
    scores = [item["score"] for item in after if item["answer"]]  # some are equal apart from rounding, which differs from run to run
    assert scores == pytest.approx(sorted(scores, reverse=True))
    assert {item["answer"] for item in after} == {item["answer"] for item in before}
    for old, new in ((old, new) for old in before for new in after if old["answer"] == new["answer"]):
        assert new["score"] == pytest.approx(old["score"] ** 0.5 * (1 if old["answer"] else np.exp(-1)), rel=1e-4)
    for threshold, decision in ((0.0, after[0]["answer"]), (1.0, None)):
        item = result_of(calibrated, "/answer", body["inputs"], **body["parameters"], decide=True, threshold=threshold)
        assert item["decision"] == decision
        assert [answer["score"] for answer in item["scores"]] == pytest.approx([answer["score"] for answer in after])


def test_summed_answers_are_not_calibrated(raw: Path, calibrated: Path) -> None:
    """The calibration is about the best score of an answer."""
    inputs = {"question": "good?", "context": LONG}
    before, after = (result(models, "/answer", inputs=inputs, parameters={"duplicates": "sum"}) for models in (raw, calibrated))
    assert after | {"score": pytest.approx(after["score"], rel=1e-5)} == before
    assert "`duplicates`" in error_of_inputs(calibrated, "/answer", inputs, duplicates="sum", calibrated=True)
    assert "`decide`" in error_of_inputs(calibrated, "/answer", inputs, duplicates="sum", decide=True)


def test_reranking_does_not_take_the_threshold_of_label_sets(tmp_path: Path) -> None:
    path = tiny.bundle(tmp_path, labels=("irrelevant", "relevant"))
    tiny.calibrate(path, {"threshold": 0.01, "aim": "coverage"}, scale=[20.0])
    item = result(tmp_path, "/rerank", query="good film", texts=TEXTS, parameters={"decide": True})
    assert item["decision"] == [entry["index"] for entry in item["scores"] if entry["score"] >= 0.5]
    assert any(0.01 <= entry["score"] < 0.5 for entry in item["scores"])
    without_effect = {"decide": True, "threshold": {"irrelevant": 0.5}}
    error_of(post(tmp_path, {"query": "good", "texts": TEXTS, "parameters": without_effect}, path="/rerank"), 422, "invalid_value")


def test_reranking_decides_which_texts_are_relevant(raw: Path, calibrated: Path) -> None:
    body = {"query": "good film", "texts": TEXTS}
    before, after = result(raw, "/rerank", **body), result(calibrated, "/rerank", **body)
    assert [item["index"] for item in after] == [item["index"] for item in before]
    odds = [np.log(item["score"] / (1 - item["score"])) for item in before]
    assert [item["score"] for item in after] == pytest.approx([1 / (1 + np.exp(-(0.5 * x + 0.5))) for x in odds], abs=1e-5)
    item = result(calibrated, "/rerank", **body, parameters={"decide": True})
    assert item["decision"] == [entry["index"] for entry in after if entry["score"] >= 0.5]
    assert result(calibrated, "/rerank", **body, parameters={"calibrated": False}) == before
    raw_scores = [result(models, "/rerank", **body, raw_scores=True) for models in (raw, calibrated)]
    assert raw_scores[1] == raw_scores[0]


def test_zero_shot_takes_thresholds_and_is_not_calibrated(raw: Path, calibrated: Path) -> None:
    body = {"inputs": "good", "parameters": {"candidate_labels": ["film", "book"]}}
    [before, after] = [result(models, "/zero-shot", **body) for models in (raw, calibrated)]
    assert after == before
    item = result(calibrated, "/zero-shot", inputs="good", parameters=body["parameters"] | {"decide": True, "threshold": {"film": 0.0}})
    assert (item["decision"], item["scores"]) == ("film", after)
    response = post(calibrated, {"inputs": "a", "parameters": body["parameters"] | {"decide": True}}, path="/zero-shot")
    assert response.status_code == 422
    assert "bert-export" not in response.json()["error"]


INFER, TENSOR = "/v2/models/classifier/infer", {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["good"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"inputs": "good", "model": "classifier"}),
        ("/v2/rerank", {"query": "good", "documents": TEXTS, "model": "ranker"}),
        ("/v1/models/classifier:predict", {"instances": TEXTS}),
        (INFER, {"inputs": [TENSOR]}),
    ],
)
def test_other_formats_keep_their_shape(raw: Path, calibrated: Path, path: str, body: dict[str, Any]) -> None:
    """They have the scores of the model, which are calibrated."""
    before, after = (result(models, path, **body) for models in (raw, calibrated))
    assert shape(after) == shape(before)


def test_decisions_of_the_open_inference_protocol_are_json(calibrated: Path) -> None:
    answer = result(calibrated, INFER, inputs=[TENSOR], parameters={"decide": True})
    assert [output["name"] for output in answer["outputs"]] == ["json"]


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value)


async def test_predictions_are_counted_by_score_and_label(tmp_path: Path) -> None:
    """Only calibrated scores count, next to the constants of the bundle. Abstentions count for any model."""
    tiny.calibrate(tiny.bundle(tmp_path, "tuned"), {"threshold": 1.0})
    tiny.bundle(tmp_path, "plain", seed=1)

    async with serving(state_of(tmp_path, allow_implicit_default=True)) as client:
        answer = await client.post("/models/tuned", json={"inputs": TEXTS, "parameters": {"decide": True}})
        await client.post("/models/tuned", json={"inputs": TEXTS, "parameters": {"calibrated": False}})
        await client.post("/models/plain", json={"inputs": TEXTS, "parameters": {"decide": True, "min_confidence": 1.0}})
        page = (await client.get("/metrics")).text
    best = [item["scores"][0] for item in answer.json()]
    assert metric(page, "scores_total", model="tuned") == metric(page, "predictions_total", model="tuned") == len(TEXTS)
    for edge in range(20):
        expected = sum(edge / 20 <= item["score"] < (edge + 1) / 20 for item in best)
        assert metric(page, "scores_total", model="tuned", from_score=f"{edge / 20:g}") == expected
    assert metric(page, "predictions_total", label=best[0]["label"]) == sum(item["label"] == best[0]["label"] for item in best)
    assert metric(page, "abstentions_total", model="tuned") == metric(page, "abstentions_total", model="plain") == len(TEXTS)
    assert metric(page, "reference_scores", model="tuned", from_score="0.5") == pytest.approx(0.1)
    assert metric(page, "reference_predictions", model="tuned", label="negative") == pytest.approx(0.4)
    assert 'model="plain",from_score' not in page


async def test_the_reference_is_that_of_the_loaded_version(tmp_path: Path) -> None:
    """A label or a score of an earlier version has no share, and no drift is computed from it; nor of a model that is unloaded."""
    models, pages = tmp_path / "models", []
    tiny.calibrate(tiny.bundle(models))
    async with serving(state_of(models), Authenticator(admin_key_file=keys(tmp_path, "swordfish"))) as client:
        for change, action in (
            (lambda: tiny.calibrate(models / "tiny", score_counts=[1, 1], label_counts={"neutral": 2}), "load"),
            (lambda: tiny.edit(models / "tiny", lambda fields: fields["graphs"][0].update(calibration=None)), "load"),
            (lambda: tiny.calibrate(models / "tiny"), "load"),
            (lambda: None, "unload"),
        ):
            change()
            assert (await client.post(f"/models/tiny/{action}", headers={"authorization": "Bearer swordfish"})).status_code == 200
            pages.append((await client.get("/metrics")).text)
    other, without, _, after_unload = pages
    assert metric(other, "reference_predictions", label="neutral") == 1
    assert metric(other, "reference_scores", from_score="0.5") == 0.5
    for page, name, labels in (
        (other, "reference_predictions", {"label": "negative"}),
        (other, "reference_scores", {"from_score": "0.95"}),
        (without, "reference_predictions", {"label": "neutral"}),
        (without, "reference_scores", {"from_score": "0.5"}),
        (after_unload, "reference_predictions", {"label": "positive"}),
        (after_unload, "reference_scores", {"from_score": "0.95"}),
    ):
        assert np.isnan(metric(page, name, **labels))


def test_the_description_of_a_model_has_its_calibration(calibrated: Path) -> None:
    calibration = call(calibrated, "GET", "/models/classifier").json()["calibration"]
    manifest = files.load_bundle(calibrated / "classifier").manifest
    assert calibration["thresholds"][0]["threshold"] == 0.57
    assert calibration["after"]["bins"] == [bin_.model_dump() for bin_ in manifest.graphs[0].calibration.after.bins]  # type: ignore[union-attr]
    assert call(calibrated, "GET", "/models/choices").json().get("calibration") is None


def test_the_stored_example_is_compared_with_raw_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example is from the export, before the calibration."""
    path = tiny.bundle(tmp_path)
    raw = result_of(tmp_path, "/classify", "a good film")
    tiny.edit(path, lambda fields: fields["example"].update(result=raw))
    tiny.calibrate(path)
    assert asyncio.run(check(Settings(models=tmp_path))) == 0
    assert "ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "row", "parameters"),
    [("classifier", {"text": "good"}, {}), ("ranker", {"query": "good", "texts": ["a film", "dull"]}, {"return_text": True})],
)
def test_files_are_scored_with_decisions(
    calibrated: Path, tmp_path: Path, model: str, row: dict[str, Any], parameters: dict[str, Any]
) -> None:
    """The answer is that of the endpoint, also in CSV, where a label and its score would otherwise have columns of their own."""
    path = "/rerank" if model == "ranker" else "/classify"
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([row, [value if isinstance(value, str) else json.dumps(value) for value in row.values()]])
    flags = ["--task", path[1:], "--parameters", json.dumps(parameters | {"decide": True}), str(source), str(output)]
    assert main(["score", "--models", str(calibrated), "--model", model, *flags]) == 0
    body = row | parameters if model == "ranker" else {"inputs": row["text"]}
    answer = result(calibrated, path, **body, model=model, parameters={"decide": True})
    [line] = read_rows(output)
    assert json.loads(line["prediction"]) == (answer if model == "ranker" else answer[0])
