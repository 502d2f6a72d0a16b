"""Writes a checkpoint's graph as ONNX, with fixed tensor names and dynamic axes. Standard operators only.

TorchScript tracing with eager attention, because ONNX Runtime 1.31's optimizer fuses that form fully; the dynamo path
leaves attention unfused (docs/export.md has the comparison).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import torch

from export.checkpoint import Checkpoint
from export.errors import GraphError

OPSET = 17
OUTPUT = "logits"


class _Logits(torch.nn.Module):
    """The model with positional inputs in a fixed order and the logits alone as output."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = checkpoint.model
        self.names = [spec.name for spec in checkpoint.inputs]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).logits
        return logits


def trace(checkpoint: Checkpoint, path: Path) -> None:
    """Exports the float32 graph: int64 inputs [rows, length] by their names, output `logits` float32 [rows, labels].

    Raises:
        GraphError: The traced graph has other inputs or outputs than asked for.
    """
    names = [spec.name for spec in checkpoint.inputs]
    # two rows of different length, so that no axis is traced as a constant 1 and masking is in the graph
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    example = {"token_ids": torch.full((2, 7), checkpoint.pad_id + 1), "attention_mask": mask, "type_ids": torch.zeros_like(mask)}
    with torch.no_grad(), warnings.catch_warnings():
        # the deprecated exporter says so at every call, and warns of every Python branch that it passes
        warnings.simplefilter("ignore")
        torch.onnx.export(
            # the exporter restores the wrapper's mode afterwards, and with it the model's
            _Logits(checkpoint).eval(),
            tuple(example[spec.fill] for spec in checkpoint.inputs),
            str(path),
            input_names=names,
            output_names=[OUTPUT],
            dynamic_axes={**{name: {0: "rows", 1: "length"} for name in names}, OUTPUT: {0: "rows"}},
            opset_version=OPSET,
            dynamo=False,
        )
    graph = onnx.load(str(path)).graph
    if [value.name for value in graph.input] != names or [value.name for value in graph.output] != [OUTPUT]:
        raise GraphError(
            f"the traced graph takes {[value.name for value in graph.input]} and gives {[value.name for value in graph.output]}, "
            f"not {names} and {OUTPUT}: the model does not use all of its inputs."
        )
