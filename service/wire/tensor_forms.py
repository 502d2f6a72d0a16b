"""Describes models for the Open Inference Protocol: their tensors of texts and of token ids; finds the task of a request's tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import TensorField, TensorForm

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
MASK_INDEX = "mask_index"  # a raw output of a fill-mask model: row and position of each mask
JSON = "json"


def form_of(task: str) -> TensorForm:
    """Returns the tensors of a task; all tasks of bundles and all results of `task_of` have them."""
    form = TASKS[task].tensors
    assert form is not None, "the task has tensors"
    return form


def names_of(form: TensorForm) -> dict[str, str]:
    """Returns each name and each alias of a form's inputs -> the name."""
    return {field.name: field.name for field in form.inputs} | {field.alias: field.name for field in form.inputs if field.alias}


@functools.cache
def _names_not_in(form: TensorForm, other: TensorForm) -> frozenset[str]:
    """Returns the inputs of a form that another form does not have."""
    return frozenset(names_of(form)) - frozenset(names_of(other))


def task_of(task: str, names: Collection[str], parameters: Mapping[str, Any]) -> str:
    """Returns the task that a request asks for: the model's own, or a derived task whose tensors or parameter it has."""
    own = form_of(task)
    for name, spec in TASKS.items():
        if spec.derivation is None or spec.tensors is None or not spec.derivation.accepts(task):
            continue
        discriminator = spec.derivation.discriminator
        is_requested = discriminator[0] == "parameters" and discriminator[-1] in parameters
        if is_requested or not _names_not_in(spec.tensors, own).isdisjoint(names):
            return name
    return task


# The inputs of clients that tokenize themselves.
RAW_INPUTS = (
    TensorField(IDS, "INT64", (-1, -1)),
    TensorField(MASK, "INT64", (-1, -1), optional=True),
    TensorField(TYPES, "INT64", (-1, -1), optional=True),
)


def raw_outputs(manifest: Manifest, graph: GraphSpec) -> tuple[TensorField, ...]:
    """Returns the outputs for such clients: the outputs of the graph, and the positions of the masks."""
    axes = {"per_text": 2, "per_mask": 2, "per_token": form_of(manifest.task).token_axes}
    fields = tuple(TensorField(output.name, "FP32", (-1,) * axes[output.kind]) for output in graph.outputs if output.kind in axes)
    return (*fields, TensorField(MASK_INDEX, "INT64", (-1, 2))) if fills_masks(graph) else fields


def fills_masks(graph: GraphSpec) -> bool:
    """Returns whether a graph has an output per mask."""
    return any(output.kind == "per_mask" for output in graph.outputs)


def described(fields: Sequence[TensorField]) -> list[dict[str, Any]]:
    """Returns fields in the format of the metadata."""
    return [{"name": field.name, "datatype": field.datatype, "shape": list(field.shape)} for field in fields]


def metadata(name: str, version: str, manifest: Manifest, graph: GraphSpec) -> dict[str, Any]:
    """Returns the metadata of a model: its texts and their results; `tensors` has the other form, token ids and raw outputs.

    They are separate because perf_analyzer requests all listed outputs, but a request has only one form.
    """
    form = form_of(manifest.task)
    return {
        "name": name,
        "versions": [version],
        "platform": "onnx_onnxv1",
        "inputs": described(form.inputs),
        "outputs": described((*form.outputs(manifest, None), TensorField(JSON, "BYTES", (-1,)))),
        "tensors": {"inputs": described(RAW_INPUTS), "outputs": described(raw_outputs(manifest, graph))},
    }


def config(name: str, manifest: Manifest, *, max_rows: int) -> dict[str, Any]:
    """Returns the configuration of a model for texts, as Triton's clients read it: the first dimension is the batch."""
    form = form_of(manifest.task)

    def tensor(field: TensorField) -> dict[str, Any]:
        kind = "TYPE_STRING" if field.datatype == "BYTES" else f"TYPE_{field.datatype}"
        return {"name": field.name, "data_type": kind, "dims": list(field.shape[1:]), "optional": field.optional}

    return {
        "name": name,
        "platform": "onnx_onnxv1",
        "backend": "onnxruntime",
        "max_batch_size": max_rows,
        "input": [tensor(field) for field in form.inputs],
        "output": [
            {key: value for key, value in tensor(field).items() if key != "optional"}
            for field in (*form.outputs(manifest, None), TensorField(JSON, "BYTES", (-1,)))
        ],
        "dynamic_batching": {},
    }
