"""Exports of pretraining heads, compared with transformers: next sentence, both heads of `ForPreTraining`, and replaced tokens."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from transformers import AlbertConfig, ElectraConfig

import bertserve.export.cli
import bertserve.service.cli
from bertserve.export.checkpoint.checkpoint import count_flops
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.service.bundle.files import Bundle
from support import json_lines, raises_exactly
from support.app_client import call, error_of
from support.bundles import Verify, exported
from support.checkpoints import POSITIONS, SIZES, VOCABULARY, bert, edit_json, save

pytestmark = pytest.mark.torch

FOLLOWS = ("is_next", "not_next")
PAIRS = [("the film was", "not very good"), ("a book", "the film is long and the book is short , but both are great ! " * 30), ("", "good")]
INPUTS = [{"text": text, "text_pair": pair} for text, pair in PAIRS]


def save_bundle(source: Path, folder: Path, task: str = "auto") -> Bundle:
    return exported(source, folder, task=task, name="bundle")


def outputs(source: Path, architecture: str, *texts: str) -> Any:
    """Returns the outputs of transformers' own class for a text or a pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, truncation=True, max_length=POSITIONS, return_tensors="pt"))


def answer_to(bundle: Bundle, path: str, **body: Any) -> Any:
    response = call(bundle.path.parent, "POST", path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refuse(bundle: Bundle, path: str, **body: Any) -> str:
    message = error_of(call(bundle.path.parent, "POST", path, json=body), 422, "invalid_value")
    assert '"text_pair": ' in message
    return message


@pytest.fixture(name="following", scope="module")
def next_sentence_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """Returns a next-sentence BERT, whose config.json has other labels, and its bundle."""
    folder = tmp_path_factory.mktemp("next")
    source = bert(folder, architecture="BertForNextSentencePrediction", labels=("LABEL_0", "LABEL_1", "LABEL_2"), problem_type="regression")
    return source, save_bundle(source, folder / "models")


def test_a_next_sentence_model_is_a_classifier_of_pairs(following: tuple[Path, Bundle]) -> None:
    """The labels and softmax come from the head, not from config.json."""
    manifest = following[1].manifest

    assert (manifest.task, manifest.labels, manifest.activation) == ("text-classification", FOLLOWS, "softmax")
    assert manifest.tokenizer.pairs_only
    assert set(manifest.example.request["inputs"]) == {"text", "text_pair"}
    assert manifest.graphs[0].validation.agreement.value == 1
    assert manifest.graphs[0].validation.samples >= 10


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        ("/classify", [INPUTS[0], "good"]),
        ("/models/bundle", [INPUTS[0], {"text": "good"}]),
        ("/", [INPUTS[0], {"text": "good", "text_pair": ""}]),
        ("/predict", [["a", "b"], ["a"]]),
        ("/v2/models/bundle/infer", [{"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["good"]}]),
    ],
)
def test_a_text_without_a_pair_is_refused(following: tuple[Path, Bundle], path: str, inputs: Any) -> None:
    refuse(following[1], path, inputs=inputs)


def test_bundles_of_pair_models_pass_check_and_verify(following: tuple[Path, Bundle], tmp_path: Path, verify: Verify) -> None:
    source, bundle = following
    best = [FOLLOWS[int(outputs(source, "BertForNextSentencePrediction", *pair).logits.argmax())] for pair in PAIRS[:2]]
    lines = json_lines(tmp_path / "data.jsonl", *(inputs | {"label": label} for inputs, label in zip(INPUTS, best, strict=False)))

    assert bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)]) == 0
    code, checks = verify(bundle.path, "--data", lines, "--checkpoint", source)
    assert (code, checks["accuracy cpu/fp32"]["metrics"]) == (0, {"graph": 1.0, "reference": 1.0})


@pytest.fixture(name="pretrained", scope="module")
def pretraining_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), architecture="BertForPreTraining", rows=len(VOCABULARY))


@pytest.fixture(name="albert", scope="module")
def pretraining_albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AlbertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=POSITIONS, embedding_size=16, **SIZES)
    return save(tmp_path_factory.mktemp("albert") / "albert", "AlbertForPreTraining", config)


def test_a_pretraining_model_fills_masks(pretrained: Path, tmp_path: Path) -> None:
    bundle = save_bundle(pretrained, tmp_path)
    manifest, text = bundle.manifest, "the [MASK] was not very good"
    logits = outputs(pretrained, "BertForPreTraining", text).prediction_logits[0, 2]
    answer = answer_to(bundle, "/fill-mask", inputs=text, parameters={"top_k": 5})
    best = logits.softmax(-1).topk(5)

    assert manifest.task == "fill-mask"
    assert manifest.tokenizer.pairs_only is False
    assert manifest.graphs[0].validation.agreement.value == 1
    assert [item["token"] for item in answer] == best.indices.tolist()
    np.testing.assert_allclose([item["score"] for item in answer], best.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "architecture", "output", "labels"),
    [
        ("pretrained", "BertForPreTraining", "seq_relationship_logits", FOLLOWS),
        pytest.param("albert", "AlbertForPreTraining", "sop_logits", ("in_order", "swapped"), marks=pytest.mark.full_grid),
    ],
)
def test_a_pretraining_model_classifies_pairs(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, architecture: str, output: str, labels: tuple[str, ...]
) -> None:
    """`--task text-classification` exports the other head; the linear operation count is the same as for fill-mask."""
    source = request.getfixturevalue(kind)
    bundle = save_bundle(source, tmp_path, "text-classification")
    manifest = bundle.manifest
    graph = onnx.load(str(bundle.path / manifest.graphs[0].file)).graph
    answer = answer_to(bundle, "/classify", inputs=INPUTS, parameters={"function_to_apply": "none"})

    assert (manifest.labels, manifest.activation, manifest.tokenizer.pairs_only) == (labels, "softmax", True)
    for items, pair in zip(answer, PAIRS, strict=True):
        scores = {item["label"]: item["score"] for item in items}
        np.testing.assert_allclose([scores[x] for x in labels], outputs(source, architecture, *pair)[output][0], rtol=0, atol=1e-4)
    refuse(bundle, "/classify", inputs="good")
    assert [value.name for value in graph.output] == ["logits"]
    both, one_head = (count_flops(load_checkpoint(str(source), LoadOptions(task=task))) for task in ("auto", "text-classification"))
    assert one_head.linear == both.linear


def test_the_error_for_another_task_lists_both_possible_tasks(pretrained: Path) -> None:
    with raises_exactly(ExportError, match=r"fill-mask .*text-classification.* question-answering"):
        load_checkpoint(str(pretrained), LoadOptions(task="question-answering"))
    assert load_checkpoint(str(pretrained), LoadOptions(task="feature-extraction")).task == "feature-extraction"


def test_unsupported_pretraining_models_are_refused(pretrained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(pretrained, tmp_path / "other")
    edit_json(other / "config.json", architectures=["RoCBertForPreTraining"])
    with raises_exactly(ExportError, match=r"'RoCBertForPreTraining'.*--task"):
        load_checkpoint(str(other))
    config = AlbertConfig(vocab_size=len(VOCABULARY), embedding_size=16, num_labels=3, **SIZES)
    with raises_exactly(ExportError, match="3 labels"):
        load_checkpoint(str(save(tmp_path / "albert", "AlbertForPreTraining", config)), LoadOptions(task="text-classification"))


SENTENCE = "the film was not very good , but a book"


def test_scores_of_replaced_tokens_are_the_sigmoid_of_the_logit(tmp_path: Path) -> None:
    """Each token gets the more likely label, with the score p for `replaced` or 1 - p for `original`, and its place in the text."""
    config = ElectraConfig(vocab_size=len(VOCABULARY), max_position_embeddings=POSITIONS, embedding_size=16, **SIZES)
    source = save(tmp_path / "electra", "ElectraForPreTraining", config)
    bundle = save_bundle(source, tmp_path / "models")
    manifest = bundle.manifest
    answer = answer_to(bundle, "/ner", inputs=SENTENCE, parameters={"aggregation_strategy": "none"})
    replaced = outputs(source, "ElectraForPreTraining", SENTENCE).logits[0, 1:-1].sigmoid().numpy()

    assert (manifest.task, manifest.labels, manifest.activation) == ("token-classification", ("original", "replaced"), "softmax")
    assert [item["entity"] for item in answer] == ["replaced" if p > 0.5 else "original" for p in replaced]
    np.testing.assert_allclose([item["score"] for item in answer], np.maximum(replaced, 1 - replaced), rtol=0, atol=1e-4)
    assert [SENTENCE[item["start"] : item["end"]] for item in answer] == SENTENCE.split()
    assert {item["entity"] for item in answer} == {"original", "replaced"}
