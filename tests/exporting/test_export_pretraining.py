"""Heads of pretraining from checkpoint to service, against transformers' own classes: which text follows, both heads of a class, replaced tokens."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
import transformers
from transformers import AlbertConfig, ElectraConfig

import bertserve.export.cli
import bertserve.service.cli
import tiny
from application import call_fresh, rejected
from bertserve.export import pipeline
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bertserve.export.pipeline import ExportSpec
from bertserve.service.bundle.manifest import Manifest
from bundles import silent
from checkpoints import POSITIONS, SIZES, bert, edit_json, save

pytestmark = pytest.mark.torch

FOLLOWS = ("is_next", "not_next")
PAIRS = [("the film was", "not very good"), ("a book", "the film is long and the book is short , but both are great ! " * 30), ("", "good")]


def exported(source: Path, folder: Path, task: str = "auto") -> tuple[Path, Manifest]:
    """Exports a checkpoint in fp32."""
    return pipeline.export(ExportSpec(str(source), folder, task=task, name="bundle", precisions=("fp32",)), silent)


def outputs(source: Path, architecture: str, *texts: str) -> Any:
    """Returns what transformers' own class gives for a text or a pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, truncation=True, max_length=POSITIONS, return_tensors="pt"))


def answered(response: httpx.Response) -> Any:
    """Returns the answer to a request that must be answered."""
    assert 200 == response.status_code, response.text
    return response.json()


def in_order(result: list[dict[str, Any]], labels: tuple[str, ...]) -> list[float]:
    """Returns the scores of a result in the order of the labels."""
    return [{item["label"]: item["score"] for item in result}[label] for label in labels]


# ---- next sentences


@pytest.fixture(name="following", scope="module")
def next_sentence_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Manifest]:
    """A BERT of next sentences, whose config.json names other labels; its bundle, and the bundle's manifest."""
    folder = tmp_path_factory.mktemp("next")
    source = bert(folder, architecture="BertForNextSentencePrediction", labels=("LABEL_0", "LABEL_1", "LABEL_2"), problem_type="regression")
    return source, *exported(source, folder / "models")


def test_the_manifest_of_next_sentences(following: tuple[Path, Path, Manifest]) -> None:
    """A classifier of pairs, with the labels of the head and a softmax, whatever config.json says."""
    manifest = following[2]

    assert ("text-classification", FOLLOWS, "softmax", True) == (
        manifest.task,
        manifest.labels,
        manifest.activation,
        manifest.tokenizer.pairs_only,
    )
    assert {"text", "text_pair"} == set(manifest.example.request["inputs"])
    assert 1 == manifest.graphs[0].evidence.label_agreement
    assert manifest.graphs[0].evidence.samples >= 10


def test_what_follows_is_said_as_in_transformers(following: tuple[Path, Path, Manifest]) -> None:
    """Logits and probabilities, of long pairs and with an empty first text."""
    source, path, _ = following
    inputs = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    expected = [outputs(source, "BertForNextSentencePrediction", *pair).logits[0] for pair in PAIRS]
    scores = answered(call_fresh(path.parent, "POST", "/classify", json={"inputs": inputs}))
    raw = answered(call_fresh(path.parent, "POST", "/classify", json={"inputs": inputs, "parameters": {"function_to_apply": "none"}}))

    for logits, found, found_raw in zip(expected, scores, raw, strict=True):
        np.testing.assert_allclose(in_order(found_raw, FOLLOWS), logits, rtol=0, atol=1e-4)
        np.testing.assert_allclose(in_order(found, FOLLOWS), logits.softmax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", ["/classify", "/models/bundle", "/"])
@pytest.mark.parametrize("alone", ["good", {"text": "good"}, {"text": "good", "text_pair": ""}])
def test_a_text_without_a_second_one_is_refused(following: tuple[Path, Path, Manifest], path: str, alone: Any) -> None:
    """With the place of the text, and a pair to send."""
    body = {"inputs": [{"text": "a", "text_pair": "b"}, alone]}
    message = rejected(call_fresh(following[1].parent, "POST", path, json=body), 422, "invalid_value")

    assert "inputs[1]" in message
    assert 'the second text is missing; give a pair, such as {"text": "It began to rain.", "text_pair": "We went inside."}.' in message


def test_a_single_sequence_is_refused_too(following: tuple[Path, Path, Manifest]) -> None:
    """In the format of Text Embeddings Inference, and as tensors."""
    models = following[1].parent
    tensors = {"inputs": [{"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["good"]}]}

    assert "the second text is missing" in rejected(call_fresh(models, "POST", "/predict", json={"inputs": [["a"]]}), 422, "invalid_value")
    assert "the second text is missing" in rejected(
        call_fresh(models, "POST", "/v2/models/bundle/infer", json=tensors), 422, "invalid_value"
    )
    assert 200 == call_fresh(models, "POST", "/predict", json={"inputs": [["a", "b"]]}).status_code


def test_bundles_of_pairs_check_and_verify(
    following: tuple[Path, Path, Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stored example is a pair, the batches that are compared are of pairs, and data of pairs are scored by the labels."""
    source, path, _ = following
    data = tmp_path / "data.jsonl"
    best = [FOLLOWS[int(outputs(source, "BertForNextSentencePrediction", *pair).logits.argmax())] for pair in PAIRS[:2]]
    lines = [{"text": text, "text_pair": pair, "label": label} for (text, pair), label in zip(PAIRS, best, strict=False)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    assert 0 == bertserve.service.cli.main(["check", "--models", str(path.parent)])
    capsys.readouterr()
    assert 0 == bertserve.export.cli.main(["verify", str(path), "--data", str(data), "--checkpoint", str(source), "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {"graph": 1.0, "reference": 1.0} == checks["accuracy cpu/fp32"]["metrics"]


# ---- both heads of a class of pretraining


@pytest.fixture(name="pretrained", scope="module")
def pretraining_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT as it is pretrained."""
    return bert(tmp_path_factory.mktemp("bert"), architecture="BertForPreTraining", rows=len(tiny.VOCABULARY))


@pytest.fixture(name="albert", scope="module")
def pretraining_albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ALBERT as it is pretrained."""
    config = AlbertConfig(vocab_size=len(tiny.VOCABULARY), max_position_embeddings=POSITIONS, embedding_size=16, **SIZES)
    return save(tmp_path_factory.mktemp("albert") / "albert", "AlbertForPreTraining", config)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("pretrained", "BertForPreTraining"), pytest.param("albert", "AlbertForPreTraining", marks=pytest.mark.full_grid)],
)
def test_a_class_of_pretraining_fills_masks(request: pytest.FixtureRequest, tmp_path: Path, kind: str, architecture: str) -> None:
    """By default, as its masked language model does."""
    source = request.getfixturevalue(kind)
    manifest = exported(source, tmp_path)[1]
    text = "the [MASK] was not very good"
    logits = outputs(source, architecture, text).prediction_logits[0, 2]
    found = answered(call_fresh(tmp_path, "POST", "/fill-mask", json={"inputs": text, "parameters": {"top_k": 5}}))
    best = logits.softmax(-1).topk(5)

    assert ("fill-mask", False, 1) == (manifest.task, manifest.tokenizer.pairs_only, manifest.graphs[0].evidence.label_agreement)
    assert best.indices.tolist() == [item["token"] for item in found]
    np.testing.assert_allclose([item["score"] for item in found], best.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "architecture", "output", "labels"),
    [
        ("pretrained", "BertForPreTraining", "seq_relationship_logits", FOLLOWS),
        pytest.param("albert", "AlbertForPreTraining", "sop_logits", ("in_order", "swapped"), marks=pytest.mark.full_grid),
    ],
)
def test_a_class_of_pretraining_judges_pairs(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, architecture: str, output: str, labels: tuple[str, ...]
) -> None:
    """When `--task text-classification` asks for its other head; the head of masks costs no more then than where it runs on masks alone."""
    source = request.getfixturevalue(kind)
    path, manifest = exported(source, tmp_path, "text-classification")
    inputs = [{"text": text, "text_pair": pair} for text, pair in PAIRS]
    body = {"inputs": inputs, "parameters": {"function_to_apply": "none"}}
    graph = onnx.load(str(path / manifest.graphs[0].file)).graph

    assert (labels, "softmax", True) == (manifest.labels, manifest.activation, manifest.tokenizer.pairs_only)
    for found, pair in zip(answered(call_fresh(tmp_path, "POST", "/classify", json=body)), PAIRS, strict=True):
        np.testing.assert_allclose(in_order(found, labels), outputs(source, architecture, *pair)[output][0], rtol=0, atol=1e-4)
    assert "the second text is missing" in rejected(
        call_fresh(tmp_path, "POST", "/classify", json={"inputs": "good"}), 422, "invalid_value"
    )
    assert ["logits"] == [value.name for value in graph.output]
    assert load_checkpoint(str(source)).flops.linear == load_checkpoint(str(source), task="text-classification").flops.linear


def test_other_tasks_are_refused_with_both_that_fit(pretrained: Path) -> None:
    """The first is what `auto` takes."""
    with pytest.raises(
        CheckpointError,
        match="a BertForPreTraining, made for fill-mask and text-classification; --task question-answering does not match it",
    ):
        load_checkpoint(str(pretrained), task="question-answering")
    assert "feature-extraction" == load_checkpoint(str(pretrained), task="feature-extraction").task


def test_classes_of_pretraining_that_are_not_understood_are_refused(pretrained: Path, tmp_path: Path) -> None:
    """A name that ends like BERT's is not BERT's, and sentences have two orders."""
    other = shutil.copytree(pretrained, tmp_path / "other")
    edit_json(other / "config.json", architectures=["RoCBertForPreTraining"])
    with pytest.raises(CheckpointError, match="cannot tell the task of architecture"):
        load_checkpoint(str(other))
    config = AlbertConfig(vocab_size=len(tiny.VOCABULARY), embedding_size=16, num_labels=3, **SIZES)
    with pytest.raises(CheckpointError, match="the head for sentence order has 3 labels"):
        load_checkpoint(str(save(tmp_path / "albert", "AlbertForPreTraining", config)), task="text-classification")


# ---- replaced tokens


@pytest.fixture(name="discriminator", scope="module")
def replaced_token_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Manifest]:
    """An ELECTRA that tells replaced tokens; its bundle, and the bundle's manifest."""
    folder = tmp_path_factory.mktemp("electra")
    config = ElectraConfig(vocab_size=len(tiny.VOCABULARY), max_position_embeddings=POSITIONS, embedding_size=16, **SIZES)
    source = save(folder / "electra", "ElectraForPreTraining", config)
    return source, *exported(source, folder / "models")


@pytest.mark.full_grid
def test_replaced_tokens_have_the_sigmoid_of_their_logit(discriminator: tuple[Path, Path, Manifest]) -> None:
    """Of each token the better of both tags: p of replaced, 1 - p of original, with the token's own place."""
    source, path, manifest = discriminator
    text = "the film was not very good , but a book"
    found = answered(call_fresh(path.parent, "POST", "/ner", json={"inputs": text, "parameters": {"aggregation_strategy": "none"}}))
    replaced = outputs(source, "ElectraForPreTraining", text).logits[0, 1:-1].sigmoid().numpy()

    assert ("token-classification", ("original", "replaced"), "softmax") == (manifest.task, manifest.labels, manifest.activation)
    assert ["replaced" if p > 0.5 else "original" for p in replaced] == [item["entity"] for item in found]
    np.testing.assert_allclose([item["score"] for item in found], np.maximum(replaced, 1 - replaced), rtol=0, atol=1e-4)
    assert text.split() == [text[item["start"] : item["end"]] for item in found]
    assert {"original", "replaced"} == {item["entity"] for item in found}


def test_neighbors_of_one_tag_are_one_span(discriminator: tuple[Path, Path, Manifest]) -> None:
    """The tags are plain ones, and `ignore_labels` leaves the originals out."""
    models = discriminator[1].parent
    text = "the film was not very good , but a book"
    spans = answered(call_fresh(models, "POST", "/ner", json={"inputs": text}))
    left = answered(call_fresh(models, "POST", "/ner", json={"inputs": text, "parameters": {"ignore_labels": ["original"]}}))

    assert text == " ".join(span["word"] for span in spans)
    assert all(a["entity_group"] != b["entity_group"] for a, b in itertools.pairwise(spans))
    assert [span for span in spans if span["entity_group"] == "replaced"] == left


def test_raw_outputs_hold_the_logit_itself(discriminator: tuple[Path, Path, Manifest]) -> None:
    """Behind a zero, for those who decode themselves."""
    source, path, _ = discriminator
    ids = [2, *(tiny.VOCABULARY.index(word) for word in ("the", "film", "was")), 3]
    body = {"inputs": [{"name": "input_ids", "shape": [1, 5], "datatype": "INT64", "data": ids}]}
    (output,) = answered(call_fresh(path.parent, "POST", "/v2/models/bundle/infer", json=body))["outputs"]
    found = np.array(output["data"]).reshape(output["shape"])

    assert (1, 5, 2) == found.shape
    assert not found[..., 0].any()
    np.testing.assert_allclose(found[0, :, 1], outputs(source, "ElectraForPreTraining", "the film was").logits[0], rtol=0, atol=1e-4)


def test_a_discriminator_fills_no_masks(discriminator: tuple[Path, Path, Manifest]) -> None:
    """Its generator does, which is another checkpoint."""
    with pytest.raises(CheckpointError, match="a ElectraForPreTraining, made for token-classification; --task fill-mask does not match it"):
        load_checkpoint(str(discriminator[0]), task="fill-mask")


@pytest.mark.full_grid
@pytest.mark.parametrize(("kind", "task"), [("pretrained", "auto"), ("albert", "text-classification"), ("discriminator", "auto")])
def test_dynamo_gives_the_same(request: pytest.FixtureRequest, tmp_path: Path, kind: str, task: str) -> None:
    """The graph of the exporter that stays is within 1e-4 too, and every answer of the samples is PyTorch's."""
    found = request.getfixturevalue(kind)
    source = found[0] if kind == "discriminator" else found
    manifest = pipeline.export(ExportSpec(str(source), tmp_path, task=task, precisions=("fp32",), tracer="dynamo"), silent)[1]

    assert manifest.graphs[0].form.startswith("dynamo")
    assert manifest.graphs[0].evidence.worst_abs_error <= 1e-4
