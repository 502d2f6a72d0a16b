"""Multiple choice from checkpoint to service: all choices of a question in one forward of PyTorch are what each gets as a row of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import bertserve.service.cli
from bertserve.export.artifact import Tracer
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.service.bundle.files import Bundle
from bertserve.service.tasks import multiple_choice
from bundles import exported
from checkpoints import bert

pytestmark = pytest.mark.torch


@pytest.fixture(name="source", scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("checkpoint"), "swag", architecture="BertForMultipleChoice")


@pytest.fixture(name="bundle", scope="module")
def exported_bundle(source: Path) -> Bundle:
    return exported(source)


def test_the_manifest_says_what_it_is(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """No labels, one logit for each text, and a head on [CLS], so that the last layer is computed for that alone; the example is stored."""
    manifest, graph = bundle.manifest, bundle.manifest.graphs[0]

    assert (multiple_choice.TASK, (), "softmax") == (manifest.task, manifest.labels, manifest.activation)
    assert [("logits", "per_text")] == [(output.name, output.kind) for output in graph.outputs]
    assert ["token_ids", "attention_mask", "type_ids"] == [spec.fill for spec in graph.inputs]
    assert "first token" in graph.form
    assert (1, True) == (graph.evidence.label_agreement, graph.batch_invariant)
    assert graph.evidence.samples >= 10
    assert 0 == bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)])
    assert capsys.readouterr().out.endswith("cpu/fp32: ok\n")


def test_nothing_is_left_of_the_axis_of_choices(bundle: Bundle) -> None:
    """The graph reads rows as they come: its token ids go into the embedding, not through a reshape."""
    graph = onnx.load(str(bundle.path / bundle.manifest.graphs[0].file)).graph
    readers = {node.op_type for node in graph.node if "input_ids" in node.input}

    assert readers <= {"Gather", "Shape", "EmbedLayerNormalization"}


def test_a_model_of_choices_reads_rows(source: Path) -> None:
    """Loaded, it takes [rows, length] like every other model, again and again, and counts as many operations as a classifier."""
    loaded = load_checkpoint(str(source))
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        first, second = (loaded.model(**inputs).logits for _ in range(2))

    assert (2, 1) == first.shape
    assert torch.equal(first, second)
    classifier = load_checkpoint(str(bert(source.parent, "classifier", labels=("a",))))
    assert loaded.flops == classifier.flops


@pytest.mark.full_grid
@pytest.mark.parametrize("tracer", ["dynamo", "torchscript"])
def test_both_tracers_read_rows(source: Path, tmp_path: Path, tracer: Tracer) -> None:
    graph = exported(source, tmp_path, tracer=tracer).manifest.graphs[0]

    assert graph.form.startswith(tracer)
    assert graph.evidence.worst_abs_error <= 1e-4
