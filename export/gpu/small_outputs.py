"""Adds outputs to a graph that are smaller than its model's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.graph import onnx_files, rewrite
from bertserve.service.bundle.graph_spec import TOP_LOG_PROBS_OUTPUT, TOP_TOKENS, TOP_TOKENS_OUTPUT, GraphSpec, InputSpec, OutputSpec
from bertserve.service.bundle.manifest import VECTOR_OUTPUT


def add_small_outputs(source: Path, target: Path, spec: GraphSpec, checkpoint: Checkpoint) -> GraphSpec:
    """Writes a graph to a new file, with small outputs in float32 if its task defines some: otherwise a GPU returns megabytes per batch.

    For embeddings, they are the vector of each text by the model's own pooling; for fill-mask, the best tokens of each mask.
    """
    model = ir.load(source)
    graph, tape, embedding = model.graph, ir.tape.Tape(), checkpoint.embedding
    outputs: tuple[OutputSpec, ...] = ()
    if embedding is not None and embedding.pooling == "graph":
        outputs = (OutputSpec(name=VECTOR_OUTPUT, kind="per_text"),)
    elif embedding is not None and (vectors := _pool(graph, tape, spec.inputs, checkpoint)) is not None:
        outputs = (OutputSpec(name=VECTOR_OUTPUT, kind="per_text"),)
        _add_output(graph, vectors, VECTOR_OUTPUT, ir.DataType.FLOAT, ["rows", embedding.dimensions])
    elif checkpoint.tokenizer.mask is not None:
        outputs = tuple(OutputSpec(name=name, kind="per_mask") for name in (TOP_LOG_PROBS_OUTPUT, TOP_TOKENS_OUTPUT))
        count = min(TOP_TOKENS, checkpoint.model.config.vocab_size)
        # the sum of a whole vocabulary needs float32
        logs = tape.op("LogSoftmax", [_as_float(graph, tape, "logits")], {"axis": -1})
        top = tape.op_multi_out("TopK", [logs, rewrite.add_constant(graph, "small/count", np.array([count]))], {"axis": -1}, num_outputs=2)
        for value, output, dtype in zip(top, outputs, (ir.DataType.FLOAT, ir.DataType.INT64), strict=True):
            _add_output(graph, value, output.name, dtype, ["masks", count])
    graph.extend(tape.nodes)
    onnx_files.save(model, target)
    return spec.model_copy(update={"small_outputs": outputs})


def _pool(graph: ir.Graph, tape: ir.tape.Tape, inputs: Sequence[InputSpec], checkpoint: Checkpoint) -> ir.Value | None:
    """Returns the pooled vectors of the last layer, float32 [rows, values]; None if the graph cannot pool like the service."""
    assert checkpoint.embedding is not None
    pooling, spec_by_fill = checkpoint.embedding.pooling, {spec.fill: spec for spec in inputs}
    one = rewrite.add_constant(graph, "small/one", np.array([1]))
    if pooling == "cls" and checkpoint.tokenizer.padding_side == "right":
        first = rewrite.add_constant(graph, "small/first", np.array(0))
        return tape.op("Gather", [_as_float(graph, tape, "last_hidden_state"), first], {"axis": 1})
    if pooling != "mean" or not {"attention_mask", "lengths"} & spec_by_fill.keys():
        return None
    value_by_name = {value.name: value for value in graph.inputs}
    if "lengths" in spec_by_fill:
        ids, lengths = (value_by_name[spec_by_fill[fill].name] for fill in ("token_ids", "lengths"))
        # the number of each token, from 1, without nodes on the CPU such as Shape, which a CUDA graph cannot capture
        ones = tape.op("Cast", [tape.op("Equal", [ids, ids])], {"to": ir.DataType.INT32})
        numbers = tape.op("CumSum", [ones, rewrite.add_constant(graph, "small/axis", np.array(1))])
        is_token = tape.op("LessOrEqual", [numbers, tape.op("Unsqueeze", [lengths, one])])
    else:
        is_token = value_by_name[spec_by_fill["attention_mask"].name]
    mask = tape.op("Cast", [is_token], {"to": ir.DataType.FLOAT})
    total = tape.op("MatMul", [tape.op("Unsqueeze", [mask, one]), _as_float(graph, tape, "last_hidden_state")])
    return tape.op("Div", [tape.op("Squeeze", [total, one]), tape.op("ReduceSum", [mask, one])])


def _as_float(graph: ir.Graph, tape: ir.tape.Tape, name: str) -> ir.Value:
    """Returns an output of the graph as float32."""
    value = next(output for output in graph.outputs if output.name == name)
    return value if value.dtype == ir.DataType.FLOAT else tape.op("Cast", [value], {"to": ir.DataType.FLOAT})


def _add_output(graph: ir.Graph, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
    graph.outputs.append(value)
