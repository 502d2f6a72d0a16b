"""Writes a checkpoint's graph as ONNX, with fixed tensor names and dynamic axes. Standard operators only.

TorchScript tracing with eager attention, because ONNX Runtime 1.31's optimizer fuses that form fully; the dynamo path
leaves attention unfused (docs/explanation/graphs.md).
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.model_patches import patch_for_tracing
from export.checkpoint.signature import read_output
from export.errors import GraphError
from export.graph import onnx_files
from service.bundle.graph_spec import InputSpec

OPSET = 17


class _PositionalModel(torch.nn.Module):
    """The model with positional inputs in a fixed order and only the outputs that the task needs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = checkpoint.model
        self.names = [spec.name for spec in checkpoint.inputs]
        self.outputs = [spec.name for spec in checkpoint.outputs]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(read_output(outputs, name) for name in self.outputs)


class _MaskedLanguageModel(torch.nn.Module):
    """A masked language model that projects onto the vocabulary only where it is asked to.

    Full logits are rows x length x vocabulary. Before the model's own head reads the encoder's output, that is cut down to the
    positions of the masks, as one row. So the modules of the head need not be known.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = checkpoint.model
        self.names = [spec.name for spec in checkpoint.inputs if spec.fill != "mask_index"]
        if self.model.base_model is self.model:
            raise GraphError(
                f"{type(self.model).__name__} has no module `{self.model.base_model_prefix}`; which is its encoder is not understood."
            )

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        *inputs, mask_index = tensors

        def gather(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
            hidden = output["last_hidden_state"]
            output["last_hidden_state"] = hidden.reshape(-1, hidden.shape[-1])[mask_index].unsqueeze(0)
            return output

        handle = self.model.base_model.register_forward_hook(gather)
        try:
            logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))["logits"]
        finally:
            handle.remove()
        return logits[0]


def trace(checkpoint: Checkpoint, path: Path) -> tuple[InputSpec, ...]:
    """Exports the float32 graph with the task's inputs and outputs, as their specs say.

    Returns:
        The inputs that the graph has: all of the checkpoint's, but for token types that the model takes and does not read.

    Raises:
        GraphError: The model cannot be traced, or the traced graph has other inputs or outputs than asked for.
    """
    inputs, outputs = checkpoint.inputs, checkpoint.outputs
    # two rows of different length, so that no axis is traced as a constant 1 and masking is in the graph
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    example = {
        "token_ids": torch.full((2, 7), 0 if checkpoint.pad_id else 1),
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
    module = _MaskedLanguageModel(checkpoint) if checkpoint.task == "fill-mask" else _PositionalModel(checkpoint)
    # the exporter puts each weight of a large model into a file of its own, beside the graph
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        torch.no_grad(),
        warnings.catch_warnings(),
        patch_for_tracing(checkpoint.model, checkpoint.max_length),
    ):
        # the deprecated exporter says so at every call, and warns of every Python branch that it passes
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                # the exporter restores the wrapper's mode afterwards, and with it the model's
                module.eval(),
                tuple(example[spec.fill] for spec in inputs),
                str(Path(folder) / path.name),
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                dynamic_axes={spec.name: axes[spec.fill] for spec in inputs} | {spec.name: axes[spec.kind] for spec in outputs},
                opset_version=OPSET,
                dynamo=False,
            )
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise GraphError(f"{type(checkpoint.model).__name__} cannot be traced: {type(error).__name__}: {reason}") from error
        onnx_files.copy(Path(folder) / path.name, path)
    graph = ir.load(path).graph
    actual = [value.name for value in graph.inputs], [value.name for value in graph.outputs]
    used = tuple(spec for spec in inputs if spec.name in actual[0] or spec.fill != "type_ids")
    expected = [spec.name for spec in used], [spec.name for spec in outputs]
    if actual != expected:
        raise GraphError(f"the traced graph has inputs and outputs {actual}, not {expected}: the model does not use all of its inputs.")
    return used
