"""Prunes heads and drops layers of BERT checkpoints, in the format that the code of the papers writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints import edit_json

PARTS = ("query", "key", "value")


def prune_heads(path: Path, pruned: Mapping[int, Sequence[int]], *, heads: int) -> None:
    """Removes heads from a checkpoint in place, in the format of transformers 4.

    Args:
        path: The checkpoint.
        pruned: Heads to remove, by layer.
        heads: Number of heads per layer before pruning.
    """
    tensors = load_file(path / "model.safetensors")
    for layer, gone in pruned.items():
        prefix = f"bert.encoder.layer.{layer}.attention"
        output = tensors[f"{prefix}.output.dense.weight"]
        kept = torch.ones(heads, output.shape[1] // heads, dtype=torch.bool)
        kept[list(gone)] = False
        rows = kept.flatten()
        tensors[f"{prefix}.output.dense.weight"] = output[:, rows].contiguous()
        for part in PARTS:
            for kind in ("weight", "bias"):
                tensors[f"{prefix}.self.{part}.{kind}"] = tensors[f"{prefix}.self.{part}.{kind}"][rows].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", pruned_heads={str(layer): list(gone) for layer, gone in pruned.items()})


def silence_heads(model: torch.nn.Module, pruned: Mapping[int, Sequence[int]], *, heads: int) -> None:
    """Zeroes the output weights of some heads, so that the model computes the same as a model without these heads."""
    with torch.no_grad():
        for layer, gone in pruned.items():
            weight = model.get_parameter(f"bert.encoder.layer.{layer}.attention.output.dense.weight")
            weight.view(weight.shape[0], heads, -1)[:, list(gone)] = 0


def drop_layers(path: Path, kept: Sequence[int]) -> None:
    """Keeps only some layers of a checkpoint, in place, and renumbers them.

    Args:
        path: The checkpoint.
        kept: Numbers of the layers to keep.
    """
    tensors = load_file(path / "model.safetensors")
    prefix = "bert.encoder.layer."
    renamed = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    for new, old in enumerate(kept):
        start = f"{prefix}{old}."
        renamed |= {f"{prefix}{new}.{name.removeprefix(start)}": tensor for name, tensor in tensors.items() if name.startswith(start)}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", num_hidden_layers=len(kept))
