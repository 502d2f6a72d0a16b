"""Checkpoints of compressed BERTs: pruned heads, dropped layers, shared layers and distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.files import Bundle
from bertserve.service.text.tokenizer import Tokenizer
from bundles import exported
from checkpoints import edit_json, edit_weights, prune_heads, silence_heads
from families import FAMILIES, SIZES
from grid import grid, rows, worst_error

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
FULL = pytest.mark.full_grid
HEADS = SIZES["num_attention_heads"]
PRUNED = {0: (1, 3), 1: (0,)}


def bert(folder: Path, **fields: Any) -> tuple[Path, Any]:
    """Returns a checkpoint and its model, which later changes of the checkpoint do not affect."""
    source = FAMILIES["BERT"].save(folder / "checkpoint", CLASSIFIES, **fields)
    return source, transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()


def error(bundle: Bundle, model: Any, precision: Any = "fp32") -> float:
    """Returns the largest difference between the logits of a bundle and a model, unbatched and in a padded batch."""
    encodings = grid(Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer), CLASSIFIES)
    with torch.no_grad():
        expected = [{"logits": model(torch.tensor(encoding.ids)[None]).logits[0].numpy()} for encoding in encodings]
    return worst_error(expected, rows(bundle, precision, encodings))


@FULL
def test_a_checkpoint_with_pruned_heads_is_exported(tmp_path: Path) -> None:
    source, whole = bert(tmp_path)
    prune_heads(source, PRUNED, heads=HEADS)
    silence_heads(whole, PRUNED, heads=HEADS)
    bundle = exported(source, precisions=("fp32", "int8"), max_int8_error=1.0)

    assert error(bundle, whole) <= 1e-4
    assert error(bundle, whole, "int8") <= 0.5
    assert bundle.manifest.graphs[0].batch_invariant
    assert "packed MultiHeadAttention" in bundle.manifest.graphs[0].form


@pytest.mark.parametrize(
    ("pruned", "message"),
    [
        # a layer without heads, a head that does not exist, a name that is not a layer, a value that is not a list
        *((pruned, "`pruned_heads`") for pruned in ({"0": [0, 1, 2, 3]}, {"0": [4]}, {"layer": [1]}, {"0": 1})),
        # matrices that are not pruned
        ({"0": [1]}, r"\[32, 24\]"),
    ],
)
def test_invalid_pruned_heads_are_refused(tmp_path: Path, pruned: dict[str, Any], message: str) -> None:
    source, _ = bert(tmp_path)
    edit_json(source / "config.json", pruned_heads=pruned)

    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(source))


def test_distilbert_with_a_pruned_head_is_loaded(tmp_path: Path) -> None:
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


def test_a_checkpoint_with_dropped_layers_is_exported(tmp_path: Path) -> None:
    source, whole = bert(tmp_path, num_hidden_layers=3)
    whole.bert.encoder.layer = whole.bert.encoder.layer[::2]
    whole.config.num_hidden_layers = 2
    whole.save_pretrained(source)

    assert error(exported(source), whole) <= 1e-4
