"""Writes a checkpoint's graph as ONNX with standard operators, fixed tensor names and dynamic axes.

PyTorch has two tracers. `dynamo` is the current one; its exported program is converted to the form that later passes
support. `torchscript` is deprecated, and only used for models that `dynamo` cannot export (docs/explanation/graphs.md).
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from bertserve.export.build_input import Tracer
from bertserve.export.checkpoint.checkpoint import Checkpoint, GraphModel
from bertserve.export.checkpoint.model_patches import patch_for_tracing
from bertserve.export.checkpoint.signature import ATTENTION_INDEX, ATTENTIONS, LAYER_ATTENTION_PREFIX, returning_attention
from bertserve.export.errors import ExportError, first_line
from bertserve.export.graph import normalize, onnx_files, rewrite
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec

# tracer -> its opset: dynamo's operators have opset 18, and a lower one would need a conversion
OPSETS: dict[Tracer, int] = {"dynamo": 18, "torchscript": 17}
TRACERS = tuple(OPSETS)  # by default, the first one that works
# errors of the tracers for models that they cannot trace
_TRACER_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)
_ROWS_AND_LENGTH = ("rows", "length")
_AXES = {
    "token_ids": _ROWS_AND_LENGTH,
    "attention_mask": _ROWS_AND_LENGTH,
    "type_ids": _ROWS_AND_LENGTH,
    "mask_index": ("masks",),
    "per_text": ("rows",),
    "per_token": _ROWS_AND_LENGTH,
    "per_mask": ("masks",),
    "per_map": ("rows", "heads", "length", "length"),  # the maps of one layer, as traced
}


def trace(checkpoint: Checkpoint, path: Path, tracer: Tracer | None = None) -> tuple[tuple[InputSpec, ...], str]:
    """Exports the float32 graph with the task's inputs and outputs, as described by their specs; by default with the first tracer that can.

    Returns:
        The graph's inputs, without token types if the model ignores them, and its description in the manifest.

    Raises:
        ExportError: The model cannot be traced, or the traced graph has different inputs or outputs than expected.
    """
    errors: list[ExportError] = []
    for candidate in TRACERS if tracer is None else (tracer,):
        try:
            inputs = (_trace_attention if checkpoint.attention_heads else _trace)(checkpoint, path, candidate)
            return inputs, f"{candidate} opset {OPSETS[candidate]}"
        except ExportError as error:
            errors.append(error)
    raise ExportError(" ".join(dict.fromkeys(map(str, errors)))) from errors[0]


def _trace_attention(checkpoint: Checkpoint, path: Path, tracer: str) -> tuple[InputSpec, ...]:
    """Exports the graph with all attention of each layer, then replaces it by the maps that a run requests; returns the inputs."""
    layers = [OutputSpec(name=f"{LAYER_ATTENTION_PREFIX}{number}", kind="per_map") for number in range(len(checkpoint.attention_heads))]
    inputs = tuple(spec for spec in checkpoint.inputs if spec != ATTENTION_INDEX)
    outputs = (*(spec for spec in checkpoint.outputs if spec != ATTENTIONS), *layers)
    with_layers = path.with_name(f"layers_{path.name}")
    used_inputs = _trace(replace(checkpoint, inputs=inputs, outputs=outputs), with_layers, tracer)
    _select_maps(with_layers, path, [spec.name for spec in layers])
    onnx_files.remove(with_layers)
    return (*used_inputs, ATTENTION_INDEX)


def _trace(checkpoint: Checkpoint, path: Path, tracer: str) -> tuple[InputSpec, ...]:
    """Exports the graph with one tracer; returns the inputs of the graph."""
    inputs, outputs = checkpoint.inputs, checkpoint.outputs
    if checkpoint.tokenizer.mask is not None and checkpoint.model.base_model is checkpoint.model:
        prefix = checkpoint.model.base_model_prefix
        raise ExportError(f"{type(checkpoint.model).__name__} has no module `{prefix}`, so its encoder is unknown.")
    module = GraphModel(checkpoint.model, [spec.name for spec in inputs], [spec.name for spec in outputs])
    attention = returning_attention(checkpoint.model) if checkpoint.attention_heads else nullcontext()
    with torch.no_grad(), _silence(), attention, patch_for_tracing(checkpoint.model, checkpoint.tokenizer.max_length):
        try:
            # the tracer restores the previous mode of the wrapper, and thereby of the model
            module.eval()(*_examples(checkpoint))  # fills the tables of the patches
            (_export_program if tracer == "dynamo" else _export_script)(module, checkpoint, path)
        except _TRACER_ERRORS as error:
            # dynamo reports its own step; the cause is the error
            cause = error.__cause__ if isinstance(error, torch.onnx.OnnxExporterError) and error.__cause__ else error
            reason = f"{type(cause).__name__}: {first_line(cause).rstrip('.')}"
            raise ExportError(f"{type(checkpoint.model).__name__} cannot be traced by {tracer}: {reason}.") from error
    graph = ir.load(path).graph
    actual = [value.name for value in graph.inputs], [value.name for value in graph.outputs]
    used_inputs = tuple(spec for spec in inputs if spec.name in actual[0] or spec.fill != "type_ids")
    expected = [spec.name for spec in used_inputs], [spec.name for spec in outputs]
    if actual != expected:
        raise ExportError(f"the traced graph has inputs and outputs {actual}, not {expected}: the model does not use all of its inputs.")
    return used_inputs


def _export_program(module: torch.nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    axes = {name: torch.export.Dim(name) for name in ("rows", "masks")}
    axes["length"] = torch.export.Dim("length", max=checkpoint.tokenizer.max_length)
    program = torch.onnx.export(
        module,
        _examples(checkpoint),
        input_names=[spec.name for spec in checkpoint.inputs],
        output_names=[spec.name for spec in checkpoint.outputs],
        # one tuple, because `forward` has one argument, a variable number of tensors
        dynamic_shapes=(tuple({i: axes[axis] for i, axis in enumerate(_AXES[spec.fill])} for spec in checkpoint.inputs),),
        opset_version=OPSETS["dynamo"],
        dynamo=True,
        optimize=False,  # `normalize` does it without changing results
        verbose=False,
    )
    assert program is not None
    axes_of = {value.name: [str(axis) for axis in value.shape or ()] for value in program.model.graph.inputs}
    if fixed := [spec.name for spec in checkpoint.inputs if axes_of[spec.name] != list(_AXES[spec.fill])]:
        # the model uses a size as a number, so the tracer fixed its current value
        raise ExportError(f"{type(checkpoint.model).__name__} cannot be traced by dynamo for any length: {fixed} have a fixed length.")
    normalize.normalize(program.model)
    onnx_files.save(program.model, path)


def _export_script(module: torch.nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    specs = [(spec.name, spec.fill) for spec in checkpoint.inputs] + [(spec.name, spec.kind) for spec in checkpoint.outputs]
    # for a large model, this tracer writes a file per weight next to the graph
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.onnx.export(
            module,
            _examples(checkpoint),
            str(Path(folder) / path.name),
            input_names=[spec.name for spec in checkpoint.inputs],
            output_names=[spec.name for spec in checkpoint.outputs],
            dynamic_axes={name: dict(enumerate(_AXES[kind])) for name, kind in specs},
            opset_version=OPSETS["torchscript"],
            dynamo=False,
        )
        onnx_files.save(ir.load(Path(folder) / path.name), path)


def _examples(checkpoint: Checkpoint) -> tuple[torch.Tensor, ...]:
    """Returns inputs of two rows of different length, so that no axis is traced as the constant 1, and the graph contains masking."""
    length, short = 7, 5
    padding = slice(short, None) if checkpoint.tokenizer.padding_side == "right" else slice(0, length - short)
    ids = torch.full((2, length), checkpoint.tokenizer.pad_id)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, padding] = 0
    for row in (0, 1):
        ids[row, mask[row] == 1] = torch.tensor(checkpoint.example_ids(int(mask[row].sum())))
    examples = {"token_ids": ids, "attention_mask": mask, "type_ids": torch.zeros_like(mask), "mask_index": torch.tensor([1, 3, 8])}
    return tuple(examples[spec.fill] for spec in checkpoint.inputs)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppresses the tracers' routine output: deprecations, traced Python branches, missing packages."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


def _select_maps(source: Path, target: Path, layers: Sequence[str]) -> None:
    """Writes the graph to a new file, with the input `ATTENTION_INDEX`, and with the output `ATTENTIONS` instead of the layers' outputs.

    The outputs `layers` are the attention of each layer, [rows, heads, length, length]. The input is int64 [maps, 3]: layer, row and head
    of each map, ascending. The output is float32 [maps, length, length].
    """
    model = rewrite.load(source)
    graph = model.graph
    weights = {value.name: value for value in graph.outputs if value.name in layers}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in layers]
    index = ir.Value(name=ATTENTION_INDEX.name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["maps", 3]))
    graph.inputs.append(index)
    bounds = [rewrite.add_constant(graph, f"attention/{name}", np.array([i], dtype=np.int64)) for name, i in (("one", 1), ("three", 3))]
    tape = ir.tape.Tape()
    zero = rewrite.add_constant(graph, "attention/zero", np.array(0, dtype=np.int64))
    # the layer of each map, [maps], and its row and head, [maps, 2]
    layer_of = tape.op("Gather", [index, zero], {"axis": 1})
    position_of = tape.op("Slice", [index, *bounds, bounds[0]])
    graph.insert_before(graph[0], tape.nodes)
    maps = []
    for number, name in enumerate(layers):
        tape = ir.tape.Tape()
        is_here = tape.op("Equal", [layer_of, rewrite.add_constant(graph, f"attention/layer_{number}", np.array(number, dtype=np.int64))])
        maps.append(tape.op("GatherND", [weights[name], tape.op("Compress", [position_of, is_here], {"axis": 0})]))
        producer = weights[name].producer()
        assert producer is not None, "weights are computed"
        # directly after the weights, so that execution in the order of nodes frees them before the next layer's weights
        graph.insert_after(producer, tape.nodes)
    output = ir.Value(name=ATTENTIONS.name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["maps", "length", "length"]))
    graph.append(ir.Node("", "Concat", maps, [ir.AttrInt64("axis", 0)], outputs=[output]))
    graph.outputs.append(output)
    rewrite.save(model, target)
