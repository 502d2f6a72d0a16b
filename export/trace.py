"""Writes a checkpoint's graph as ONNX, with fixed tensor names and dynamic axes. Standard operators only.

TorchScript tracing with eager attention, because ONNX Runtime 1.31's optimizer fuses that form fully; the dynamo path
leaves attention unfused (docs/export.md has the comparison).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import torch

from export import embedding
from export.checkpoint import Checkpoint
from export.errors import GraphError

OPSET = 17


class _Outputs(torch.nn.Module):
    """The model with positional inputs in a fixed order and only the outputs that the task needs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = checkpoint.model
        self.names = [spec.name for spec in checkpoint.inputs]
        self.outputs = [spec.name for spec in checkpoint.outputs]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(embedding.output(outputs, name) for name in self.outputs)


class _Masked(torch.nn.Module):
    """A masked language model that projects onto the vocabulary only where it is asked to.

    Full logits are rows x length x vocabulary; the positions of the masks are gathered before the projection.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        model = checkpoint.model
        heads = [child for name, child in model.named_children() if name != model.base_model_prefix]
        if len(heads) != 1:
            raise GraphError(f"{type(model).__name__} has {len(heads)} modules beside its encoder; which is its head is not understood.")
        self.encoder = model.base_model
        self.head = heads[0]
        self.names = [spec.name for spec in checkpoint.inputs if spec.fill != "mask_index"]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        *inputs, mask_index = tensors
        hidden = self.encoder(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        logits: torch.Tensor = self.head(hidden.reshape(-1, hidden.shape[-1])[mask_index])
        return logits


def trace(checkpoint: Checkpoint, path: Path) -> None:
    """Exports the float32 graph with the task's inputs and outputs, as their specs say.

    Raises:
        GraphError: The traced graph has other inputs or outputs than asked for.
    """
    taken, given = checkpoint.inputs, checkpoint.outputs
    # two rows of different length, so that no axis is traced as a constant 1 and masking is in the graph
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    example = {
        "token_ids": torch.full((2, 7), checkpoint.pad_id + 1),
        "attention_mask": mask,
        "type_ids": torch.zeros_like(mask),
        "mask_index": torch.tensor([1, 3, 8]),
    }
    axes = {
        "token_ids": {0: "rows", 1: "length"},
        "attention_mask": {0: "rows", 1: "length"},
        "type_ids": {0: "rows", 1: "length"},
        "mask_index": {0: "masks"},
        "per_text": {0: "rows"},
        "per_token": {0: "rows", 1: "length"},
        "per_mask": {0: "masks"},
    }
    module = _Masked(checkpoint) if checkpoint.task == "fill-mask" else _Outputs(checkpoint)
    with torch.no_grad(), warnings.catch_warnings():
        # the deprecated exporter says so at every call, and warns of every Python branch that it passes
        warnings.simplefilter("ignore")
        torch.onnx.export(
            # the exporter restores the wrapper's mode afterwards, and with it the model's
            module.eval(),
            tuple(example[spec.fill] for spec in taken),
            str(path),
            input_names=[spec.name for spec in taken],
            output_names=[spec.name for spec in given],
            dynamic_axes={spec.name: axes[spec.fill] for spec in taken} | {spec.name: axes[spec.kind] for spec in given},
            opset_version=OPSET,
            dynamo=False,
        )
    graph = onnx.load(str(path)).graph
    actual = [value.name for value in graph.input], [value.name for value in graph.output]
    expected = [spec.name for spec in taken], [spec.name for spec in given]
    if actual != expected:
        raise GraphError(f"the traced graph has inputs and outputs {actual}, not {expected}: the model does not use all of its inputs.")
