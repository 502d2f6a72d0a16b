"""BERTs that were made smaller, as checkpoints: pruned heads, dropped layers, shared layers, distilled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bertserve.export.pipeline import ExportSpec, export
from bertserve.service.bundle.files import load_bundle
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.text.tokenizer import Tokenizer
from bundles import silent
from checkpoints import edit_json, edit_weights
from compression import drop_layers, prune_heads, silence_heads
from families import FAMILIES, SIZES
from grid import fp32_error, grid, rows

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
FULL = pytest.mark.full_grid
HEADS = SIZES["num_attention_heads"]
PRUNED = {0: (1, 3), 1: (0,)}


def bert(folder: Path, **fields: Any) -> tuple[Path, Any]:
    """Returns a checkpoint, and its model, which stays as it is."""
    source = FAMILIES["BERT"].save(folder / "checkpoint", CLASSIFIES, **fields)
    return source, transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()


def errors(source: Path, folder: Path, model: Any, precisions: Sequence[Precision] = ("fp32",)) -> tuple[Manifest, list[float]]:
    """Exports a checkpoint; returns its manifest, and for each precision the largest difference of a logit to a model, in a padded batch."""
    path, manifest = export(ExportSpec(str(source), folder / "models", precisions=precisions, max_int8_error=1.0), silent)
    bundle = load_bundle(path)
    encodings = grid(Tokenizer(bundle.tokenizer_path, manifest.tokenizer), CLASSIFIES)
    with torch.no_grad():
        expected = [model(torch.tensor(encoding.ids)[None]).logits[0].numpy() for encoding in encodings]
    found = [[row["logits"] for row in rows(bundle, precision, encodings)[1]] for precision in precisions]
    return manifest, [float(np.abs(np.array(expected) - np.array(each)).max()) for each in found]


@pytest.mark.full_grid
@pytest.mark.parametrize("precisions", [("fp32",), ("fp32", "int8")])
def test_pruned_heads_are_gone(tmp_path: Path, precisions: tuple[Precision, ...]) -> None:
    """Each layer has its own number of heads, fused as ever; the answers are those of all heads, of which some say nothing."""
    source, whole = bert(tmp_path)
    prune_heads(source, PRUNED, heads=HEADS)
    silence_heads(whole, PRUNED, heads=HEADS)
    manifest, found = errors(source, tmp_path, whole, precisions)

    assert found[0] <= 1e-4
    assert found[-1] <= 0.5
    assert manifest.graphs[0].batch_invariant
    assert "packed MultiHeadAttention with key padding" in manifest.graphs[0].form


@pytest.mark.parametrize("pruned", [{"0": [0, 1, 2, 3]}, {"0": [4]}, {"layer": [1]}, {"0": 1}])
def test_pruned_heads_that_make_no_sense_are_refused(tmp_path: Path, pruned: dict[str, Any]) -> None:
    """A layer without heads, a head that is not there, what is no layer, what is no list."""
    source, _ = bert(tmp_path)
    edit_json(source / "config.json", pruned_heads=pruned)

    with pytest.raises(CheckpointError, match=r"`pruned_heads` of .* is \{"):
        load_checkpoint(str(source))


def test_heads_that_were_not_pruned_are_another_shape(tmp_path: Path) -> None:
    """A configuration that says so of whole matrices is refused, and not cut."""
    source, _ = bert(tmp_path)
    edit_json(source / "config.json", pruned_heads={"0": [1]})

    with pytest.raises(CheckpointError, match="have another shape than its config"):
        load_checkpoint(str(source))


def test_distilbert_without_heads_is_loaded(tmp_path: Path) -> None:
    """Its modules have other names."""
    source = FAMILIES["DistilBERT"].save(tmp_path / "checkpoint", CLASSIFIES)
    size = 32 // HEADS

    def prune(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("q_lin.weight", "k_lin.weight", "v_lin.weight", "q_lin.bias", "k_lin.bias", "v_lin.bias"):
            key = f"distilbert.transformer.layer.0.attention.{name}"
            tensors[key] = tensors[key][size:].contiguous()
        key = "distilbert.transformer.layer.0.attention.out_lin.weight"
        tensors[key] = tensors[key][:, size:].contiguous()

    edit_weights(source, prune)
    edit_json(source / "config.json", pruned_heads={"0": [0]})

    assert (32, 32 - size) == load_checkpoint(str(source)).model.get_parameter(
        "distilbert.transformer.layer.0.attention.out_lin.weight"
    ).shape


def test_dropped_layers_are_gone(tmp_path: Path) -> None:
    """The other layers of the teacher answer."""
    source, whole = bert(tmp_path, num_hidden_layers=3)
    drop_layers(source, (0, 2))
    whole.bert.encoder.layer = torch.nn.ModuleList([whole.bert.encoder.layer[i] for i in (0, 2)])

    assert errors(source, tmp_path, whole)[1][0] <= 1e-4


@FULL
def test_a_distilled_student_brings_what_its_training_needed(tmp_path: Path) -> None:
    """TinyBERT's checkpoints keep the matrices that compared its layers with the teacher's; they are no part of the model."""
    source, student = bert(tmp_path, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40)
    edit_weights(source, lambda tensors: tensors.update({"fit_dense.weight": torch.ones(48, 24), "fit_dense.bias": torch.ones(48)}))

    assert errors(source, tmp_path, student)[1][0] <= 1e-4


@FULL
def test_layers_share_weights_in_groups(tmp_path: Path) -> None:
    """ALBERT's layers of two groups, and of two layers a group."""
    for i, fields in enumerate(({"num_hidden_groups": 2, "num_hidden_layers": 4}, {"inner_group_num": 2, "num_hidden_layers": 2})):
        (tmp_path / str(i)).mkdir()
        assert fp32_error("ALBERT", CLASSIFIES, tmp_path / str(i), **fields) <= 1e-4
