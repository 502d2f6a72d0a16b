"""Exports of pretraining heads, compared with transformers: next sentence, and both heads of `ForPreTraining`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bertserve.export.cli
import bertserve.service.cli
import tiny
from application import call_fresh, rejected
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.files import Bundle
from bundles import Verify, exported, json_lines
from checkpoints import POSITIONS, bert, edit_json

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)

FOLLOWS = ("is_next", "not_next")
PAIRS = [("the film was", "not very good"), ("a book", "the film is long and the book is short , but both are great ! " * 30), ("", "good")]
INPUTS = [{"text": text, "text_pair": pair} for text, pair in PAIRS]


def outputs(source: Path, architecture: str, *texts: str) -> Any:
    """Returns the outputs of transformers' own class for a text or a pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, truncation=True, max_length=POSITIONS, return_tensors="pt"))


def ask(bundle: Bundle, path: str, **body: Any) -> Any:
    response = call_fresh(bundle.path.parent, "POST", path, json=body)
    assert 200 == response.status_code, response.text
    return response.json()


# ---- next sentence


@pytest.fixture(name="following", scope="module")
def next_sentence_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """Returns a next-sentence BERT, whose config.json has other labels, and its bundle."""
    folder = tmp_path_factory.mktemp("next")
    source = bert(folder, architecture="BertForNextSentencePrediction", labels=("LABEL_0", "LABEL_1", "LABEL_2"), problem_type="regression")
    return source, exported(source, folder / "models", name="bundle")


def test_a_next_sentence_model_is_a_classifier_of_pairs(following: tuple[Path, Bundle]) -> None:
    """The labels and softmax are those of the head, whatever config.json contains."""
    manifest = following[1].manifest

    assert ("text-classification", FOLLOWS, "softmax") == (manifest.task, manifest.labels, manifest.activation)
    assert manifest.tokenizer.pairs_only
    assert {"text", "text_pair"} == set(manifest.example.request["inputs"])
    assert 1 == manifest.graphs[0].evidence.label_agreement
    assert manifest.graphs[0].evidence.samples >= 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"inputs": [{"text": "a", "text_pair": "b"}, "good"]}),
        ("/models/bundle", {"inputs": [{"text": "a", "text_pair": "b"}, {"text": "good"}]}),
        ("/", {"inputs": {"text": "good", "text_pair": ""}}),
        ("/predict", {"inputs": [["a"]]}),
        ("/v2/models/bundle/infer", {"inputs": [{"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["good"]}]}),
    ],
)
def test_a_text_without_a_pair_is_refused(following: tuple[Path, Bundle], path: str, body: Any) -> None:
    response = call_fresh(following[1].path.parent, "POST", path, json=body)

    assert '"text_pair": ' in rejected(response, 422, "invalid_value")


def test_bundles_of_pair_models_pass_check_and_verify(following: tuple[Path, Bundle], tmp_path: Path, verify: Verify) -> None:
    """The example, the compared batches and the data are pairs; accuracy is 1 for the labels that transformers predicts."""
    source, bundle = following
    best = [FOLLOWS[int(outputs(source, "BertForNextSentencePrediction", *pair).logits.argmax())] for pair in PAIRS[:2]]
    lines = json_lines(tmp_path / "data.jsonl", *(inputs | {"label": label} for inputs, label in zip(INPUTS, best, strict=False)))

    assert 0 == bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)])
    code, checks = verify(bundle.path, "--data", lines, "--checkpoint", source)
    assert (0, {"graph": 1.0, "reference": 1.0}) == (code, checks["accuracy cpu/fp32"]["metrics"])


# ---- both heads of `ForPreTraining`


@pytest.fixture(name="pretrained", scope="module")
def pretraining_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), architecture="BertForPreTraining", rows=len(tiny.VOCABULARY))


def test_a_pretraining_model_fills_masks(pretrained: Path, tmp_path: Path) -> None:
    bundle, text = exported(pretrained, tmp_path), "the [MASK] was not very good"
    logits = outputs(pretrained, "BertForPreTraining", text).prediction_logits[0, 2]
    found = ask(bundle, "/fill-mask", inputs=text, parameters={"top_k": 5})
    best = logits.softmax(-1).topk(5)

    assert ("fill-mask", False) == (bundle.manifest.task, bundle.manifest.tokenizer.pairs_only)
    assert best.indices.tolist() == [item["token"] for item in found]
    np.testing.assert_allclose([item["score"] for item in found], best.values, rtol=0, atol=1e-4)


def test_a_pretraining_model_classifies_pairs(pretrained: Path, tmp_path: Path) -> None:
    """`--task text-classification` exports the other head; the linear operation count is the same as for fill-mask."""
    bundle = exported(pretrained, tmp_path, task="text-classification")
    answer = ask(bundle, "/classify", inputs=INPUTS, parameters={"function_to_apply": "none"})

    assert (FOLLOWS, "softmax", True) == (bundle.manifest.labels, bundle.manifest.activation, bundle.manifest.tokenizer.pairs_only)
    for result, pair in zip(answer, PAIRS, strict=True):
        scores = {item["label"]: item["score"] for item in result}
        expected = outputs(pretrained, "BertForPreTraining", *pair).seq_relationship_logits[0]
        np.testing.assert_allclose([scores[label] for label in FOLLOWS], expected, rtol=0, atol=1e-4)
    assert load_checkpoint(str(pretrained)).flops.linear == bundle.manifest.flops.linear


def test_the_error_for_another_task_lists_both_possible_tasks(pretrained: Path) -> None:
    """The error lists the task of `auto` first. Feature extraction is accepted."""
    with pytest.raises(CheckpointError, match="fill-mask and text-classification; --task question-answering"):
        load_checkpoint(str(pretrained), task="question-answering")
    assert "feature-extraction" == load_checkpoint(str(pretrained), task="feature-extraction").task


def test_an_unsupported_pretraining_model_is_refused(pretrained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(pretrained, tmp_path / "other")
    edit_json(other / "config.json", architectures=["RoCBertForPreTraining"])
    with pytest.raises(CheckpointError, match=r"\['RoCBertForPreTraining'\]; give --task"):
        load_checkpoint(str(other))
