"""Exports of multiple-choice models: each choice of a question becomes a separate row of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bertserve.service.cli
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


def test_the_manifest_describes_a_multiple_choice_model(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no labels and one logit per text. The last layer is computed only for [CLS], and `check` passes on the example."""
    manifest, graph = bundle.manifest, bundle.manifest.graphs[0]

    assert (multiple_choice.TASK, (), "softmax") == (manifest.task, manifest.labels, manifest.activation)
    assert [("logits", "per_text")] == [(output.name, output.kind) for output in graph.outputs]
    assert ["token_ids", "attention_mask", "type_ids"] == [spec.fill for spec in graph.inputs]
    assert "first token" in graph.form
    assert (1, True) == (graph.evidence.label_agreement, graph.batch_invariant)
    assert graph.evidence.samples >= 10
    assert 0 == bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)])
    assert capsys.readouterr().out.endswith("cpu/fp32: ok\n")


def test_a_loaded_multiple_choice_model_takes_rows(source: Path) -> None:
    """Its inputs are [rows, length] in repeated calls, and it has as many operations as a classifier."""
    loaded = load_checkpoint(str(source))
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        first, second = (loaded.model(**inputs).logits for _ in range(2))

    assert (2, 1) == first.shape
    assert torch.equal(first, second)
    classifier = load_checkpoint(str(bert(source.parent, "classifier", labels=("a",))))
    assert loaded.flops == classifier.flops
