"""Exports for token classification, question answering and fill-mask. test_export_families.py compares outputs with PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bertserve.service.cli
import tiny
from bertserve.service.bundle.files import Bundle
from bertserve.service.tasks import fill_mask, question_answering, token_classification
from bundles import Served, exported, refused
from checkpoints import POSITIONS, ROWS, bert, edit_json

pytestmark = pytest.mark.torch

LONG = "the film was not very good , but the book is great ! " * 20
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ARCHITECTURES = {
    token_classification.TASK: "BertForTokenClassification",
    question_answering.TASK: "BertForQuestionAnswering",
    fill_mask.TASK: "BertForMaskedLM",
}
LABELS = {token_classification.TASK: ENTITIES, question_answering.TASK: ("LABEL_0", "LABEL_1"), fill_mask.TASK: tiny.LABELS}
# Long enough for all samples of the export, and less than the 1024 rows from which int8 quantizes a table.
LENGTHS = {token_classification.TASK: POSITIONS, question_answering.TASK: POSITIONS, fill_mask.TASK: 1000}


def random_checkpoint(folder: Path, task: str) -> Path:
    length = LENGTHS[task]
    return bert(folder, f"tiny-{task}", labels=LABELS[task], architecture=ARCHITECTURES[task], positions=length, model_max_length=length)


@pytest.fixture(name="bundles", scope="module")
def exported_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Returns the bundle of a checkpoint of each task, in one models folder."""
    folder = tmp_path_factory.mktemp("tasks")
    return {task: exported(random_checkpoint(folder, task)) for task in ARCHITECTURES}


def test_the_stored_examples_pass_the_check(bundles: dict[str, Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    ner, qa, mask = (bundles[task].manifest.example for task in ARCHITECTURES)

    for item in ner.result:
        assert {"entity_group", "score", "word", "start", "end"} == set(item)
        assert item["word"] == ner.request["inputs"][item["start"] : item["end"]]
    assert {"answer", "score", "start", "end"} == set(qa.result)
    assert [{"score", "token", "token_str", "sequence"}] == [set(item) for item in mask.result]
    assert "[MASK]" in mask.request["inputs"]
    assert 0 == bertserve.service.cli.main(["check", "--models", str(bundles[fill_mask.TASK].path.parent)])
    out = capsys.readouterr().out
    assert [True] * 3 == [f"tiny-{task}: {task}, cpu/fp32: ok" in out for task in ARCHITECTURES]


@pytest.mark.parametrize("task", list(ARCHITECTURES))
def test_the_manifest_has_the_fields_of_its_task(bundles: dict[str, Bundle], task: str) -> None:
    manifest, spec = bundles[task].manifest, bundles[task].manifest.tokenizer
    mask = {"token": "[MASK]", "id": 4} if task == fill_mask.TASK else None
    labels = ENTITIES if task == token_classification.TASK else ()

    assert (labels, "softmax") == (manifest.labels, manifest.activation)
    assert (0, "##", mask) == (spec.cls_index, spec.subword_prefix, spec.mask.model_dump() if spec.mask else None)


def test_the_graph_projects_only_masks(bundles: dict[str, Bundle]) -> None:
    served = Served(bundles[fill_mask.TASK])
    encodings = served.encodings(*(fill_mask.FillMaskRequest(text) for text in ("[MASK]", f"a [MASK] [MASK] {LONG[:300]}")))

    assert [(1, ROWS), (2, ROWS)] == [row["logits"].shape for row in served.engine.run(encodings)]


def test_a_checkpoint_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path, fill_mask.TASK)
    edit_json(source / "tokenizer_config.json", mask_token=None, tokenizer_class="PreTrainedTokenizerFast")

    assert "mask token" in refused(source)


def test_a_question_answering_checkpoint_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path, question_answering.TASK)
    edit_json(source / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    document = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    for template in ("single", "pair"):
        pieces = document["post_processor"][template]
        document["post_processor"][template] = [piece for piece in pieces if piece.get("SpecialToken", {}).get("id") != "[CLS]"]
    (source / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")

    assert exported(source).manifest.tokenizer.cls_index is None
