"""Exports for token classification, question answering and fill-mask. test_export_families.py compares outputs with PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bertserve.service.cli
import tiny
from bertserve.export.int8 import graph_edits
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.tasks import fill_mask, question_answering, token_classification
from bundles import Served, exported, refused
from checkpoints import POSITIONS, ROWS, bert, edit_json, few_texts

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


def random_checkpoint(folder: Path, task: str, *, positions: int | None = None, **options: Any) -> Path:
    length = LENGTHS[task] if positions is None else positions
    options = {"positions": length, "model_max_length": length, **options}
    return bert(folder, f"tiny-{task}", labels=LABELS[task], architecture=ARCHITECTURES[task], **options)


@dataclass(frozen=True)
class Exported:
    """A checkpoint and its bundle."""

    source: Path
    bundle: Bundle

    @property
    def task(self) -> str:
        return self.bundle.manifest.task

    def graph(self, precision: Any) -> GraphSpec:
        return self.bundle.graph("cpu", precision)

    def model(self, precision: Any) -> onnx.GraphProto:
        return onnx.load(str(self.bundle.path / self.graph(precision).file)).graph


@pytest.fixture(name="all_exported", scope="module")
def all_exported_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Returns a checkpoint of each task, exported in fp32 and int8 into one models folder."""
    folder = tmp_path_factory.mktemp("tasks")
    made = {}
    for task in ARCHITECTURES:
        source = random_checkpoint(folder, task)
        made[task] = Exported(source, exported(source, precisions=("fp32", "int8"), calibration=few_texts(folder)))
    return made


@pytest.fixture(name="each", params=list(ARCHITECTURES))
def exported_bundle(request: pytest.FixtureRequest, all_exported: dict[str, Exported]) -> Exported:
    return all_exported[request.param]


def test_the_stored_examples_pass_the_check(all_exported: dict[str, Exported], capsys: pytest.CaptureFixture[str]) -> None:
    ner, qa, mask = (all_exported[task].bundle.manifest.example for task in ARCHITECTURES)

    for item in ner.result:
        assert {"entity_group", "score", "word", "start", "end"} == set(item)
        assert item["word"] == ner.request["inputs"][item["start"] : item["end"]]
    assert {"answer", "score", "start", "end"} == set(qa.result)
    assert [{"score", "token", "token_str", "sequence"}] == [set(item) for item in mask.result]
    assert "[MASK]" in mask.request["inputs"]
    assert 0 == bertserve.service.cli.main(["check", "--models", str(all_exported[fill_mask.TASK].bundle.path.parent)])
    out = capsys.readouterr().out
    assert [True] * 3 == [f"tiny-{task}: {task}, cpu/int8: ok" in out for task in ARCHITECTURES]


def test_the_manifest_has_the_fields_of_its_task(each: Exported) -> None:
    """Only token classification has labels, and only fill-mask has a mask. [CLS] is first, and `##` marks subwords."""
    manifest, spec = each.bundle.manifest, each.bundle.manifest.tokenizer
    mask = {"token": "[MASK]", "id": 4} if each.task == fill_mask.TASK else None
    labels = ENTITIES if each.task == token_classification.TASK else ()

    assert (labels, "softmax") == (manifest.labels, manifest.activation)
    assert (0, "##", mask) == (spec.cls_index, spec.subword_prefix, spec.mask.model_dump() if spec.mask else None)


def test_int8_reports_what_was_quantized(each: Exported) -> None:
    """Four products per layer, the two products of fill-mask's head, and one embedding are quantized; narrow heads stay in float.

    The only float32 tensors with the vocabulary's size are scales, biases, and a projection's few outlying channels.
    """
    quantized, graph = each.graph("int8").evidence.quantized, each.model("int8")
    products = {token_classification.TASK: 8, question_answering.TASK: 8, fill_mask.TASK: 10}[each.task]
    floats = [tensor.dims for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT and ROWS in tensor.dims]

    assert (products, 1) == (quantized["MatMulIntegerToFloat"], quantized["PerRowEmbedding"])
    assert products == [node.op_type for node in graph.node].count("MatMulIntegerToFloat")
    assert [] == [list(dims) for dims in floats if np.prod(dims) > graph_edits.INPUT_CHANNELS * ROWS]


def test_the_graph_projects_only_masks(all_exported: dict[str, Exported]) -> None:
    """The output has one row per mask, whatever the padded length of the batch."""
    served = Served(all_exported[fill_mask.TASK].bundle)
    encodings = served.encodings(*(fill_mask.FillMaskRequest(text) for text in ("[MASK]", f"a [MASK] [MASK] {LONG[:300]}")))

    assert [(1, ROWS), (2, ROWS)] == [row["logits"].shape for row in served.engine.run(encodings)]


@pytest.mark.parametrize(
    ("task", "length"),
    [(question_answering.TASK, 64), (fill_mask.TASK, 32), pytest.param(token_classification.TASK, 64, marks=pytest.mark.full_grid)],
)
def test_a_checkpoint_with_few_positions_is_exported(tmp_path: Path, task: str, length: int) -> None:
    """The samples are longer than the model's positions; the export compares their logits with PyTorch's."""
    assert length == exported(random_checkpoint(tmp_path, task, positions=length)).manifest.tokenizer.max_length


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


@pytest.mark.parametrize("task", list(ARCHITECTURES))
def test_a_checkpoint_of_another_task_is_refused(tmp_path: Path, task: str) -> None:
    other = question_answering.TASK if task == token_classification.TASK else token_classification.TASK
    message = refused(random_checkpoint(tmp_path, task), task=other)

    assert all(fact in message for fact in (ARCHITECTURES[task], f"{task}; --task {other}"))
