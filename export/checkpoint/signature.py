"""The signature of a checkpoint's graph: names of its inputs and outputs, and how each output is read from the PyTorch model's.

Layers of an embedding graph and attention are additional outputs. This module checks which layers the model has, and
whether it returns its attention in the supported form.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.checkpoint.token_types import TYPE_IDS
from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec
from bertserve.service.bundle.manifest import LAST_FOUR, VECTOR_OUTPUT, Embedding, Layers, Task, TokenTypes

INPUTS: dict[str, InputSpec] = {
    "input_ids": InputSpec(name="input_ids", fill="token_ids"),
    "attention_mask": InputSpec(name="attention_mask", fill="attention_mask"),
    TYPE_IDS: InputSpec(name=TYPE_IDS, fill="type_ids"),
}
MASK_INDEX = InputSpec(name="mask_index", fill="mask_index")
ATTENTION_INDEX = InputSpec(name="attention_index", fill="attention_index")
LAST_FOUR_LAYERS = "last_four_hidden_states"
LAYERS_PREFIX = "hidden_states_"  # followed by the layer's numbers
ATTENTIONS = OutputSpec(name="attentions", kind="per_map")
LAYER_ATTENTION_PREFIX = "attentions_"  # followed by the layer's number, from 0


def model_inputs(model: PreTrainedModel, tokenizer: Any, token_types: TokenTypes | None) -> tuple[InputSpec, ...]:
    """Returns the inputs of a model that its tokenizer provides, in the order of the model's `forward`.

    `token_types` decides about token types, because the tokenizer's class can give other types than the training.
    """
    parameters = inspect.signature(model.forward).parameters
    if model.main_input_name not in INPUTS:
        raise ExportError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only text models can be exported.")
    unknown_inputs = [name for name in tokenizer.model_input_names if name not in INPUTS]
    if unknown_inputs:
        raise ExportError(f"the tokenizer gives inputs that are not supported: {', '.join(unknown_inputs)}.")
    provided = {*tokenizer.model_input_names} - {TYPE_IDS} | ({TYPE_IDS} if token_types == "template" else set())  # noqa: S105
    return tuple(INPUTS[name] for name in parameters if name in INPUTS and name in provided)  # the tracer passes inputs by position


def graph_outputs(task: Task, embedding: Embedding | None) -> tuple[OutputSpec, ...]:
    """Returns the outputs of a task's graph; for embeddings, the layers are part of them."""
    outputs = EXPORT_TASKS[task].outputs
    if embedding is not None and embedding.layers != "last":
        outputs = (*outputs, OutputSpec(name=embedding.layers_output, kind="per_token"))
    if embedding is not None and embedding.pooling == "graph":
        outputs = (*outputs, OutputSpec(name=VECTOR_OUTPUT, kind="per_text"))
    return outputs


def read_output(outputs: Any, name: str) -> torch.Tensor:
    """Returns an output of a model's `forward` by its name in the graph, float32 [rows, ...]."""
    if name == LAST_FOUR_LAYERS or name.startswith(LAYERS_PREFIX):
        # the last one is read from `last_hidden_state`, because some models apply a norm after the last layer
        states = (*outputs.hidden_states[:-1], outputs.last_hidden_state)
        layers = range(-LAST_FOUR, 0) if name == LAST_FOUR_LAYERS else map(int, name.removeprefix(LAYERS_PREFIX).split("_"))
        return torch.cat([states[layer] for layer in layers], dim=-1)
    if name.startswith(LAYER_ATTENTION_PREFIX):
        return outputs["attentions"][int(name.removeprefix(LAYER_ATTENTION_PREFIX))]
    return outputs[name]


def return_layers(model: PreTrainedModel, tokenizer: Any, layers: Layers) -> tuple[Layers, tuple[int, ...]]:
    """Makes an encoder return layers: a name, or numbers of transformers' `hidden_states`, where negative numbers count from the end.

    Returns:
        The layers of the manifest: the name, or numbers counted from 0, ascending, including the last layer; and the requested layers in
        their order, with these numbers, or negative ones for a name.
    """
    if layers == "last":
        return layers, (-1,)
    if layers == "last_four" and (count := model.config.num_hidden_layers) < LAST_FOUR:
        raise ExportError(f"the model has {count} layers, but --layers last_four needs {LAST_FOUR}; remove it.")
    model.config.output_hidden_states = True
    if layers == "last_four":
        return layers, tuple(range(-LAST_FOUR, 0))
    with torch.no_grad():
        outputs: Any = model(input_ids=torch.tensor([tokenizer("a")["input_ids"]]))
    shapes = [list(state.shape) for state in outputs.hidden_states or ()]
    if not shapes or any(shape != list(outputs.last_hidden_state.shape) for shape in shapes):
        raise ExportError(f"{type(model).__name__} has layers of several shapes, {shapes}; export it without --layers.")
    depth = len(shapes) - 1
    if unknown_layers := [layer for layer in layers if not -depth - 1 <= layer <= depth]:
        raise ExportError(
            f"--layers has {unknown_layers[0]}, but the model has the layers 1 to {depth}, and 0 for its embeddings; -1 is the last one."
        )
    numbers = [layer % (depth + 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise ExportError(f"--layers has a duplicate: {','.join(map(str, layers))}; name each once.")
    return ("last", (-1,)) if numbers == [depth] else (tuple(sorted({*numbers, depth})), tuple(numbers))


@contextmanager
def returning_attention(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model return its attention in the block only, because the attention of a long text needs gigabytes."""
    before = model.config.output_attentions
    model.config.output_attentions = True
    try:
        yield
    finally:
        model.config.output_attentions = before


def count_heads(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Returns the number of heads of each layer, from the model's attention, which must be eager; other implementations return none."""
    ids = torch.tensor([tokenizer("a b c")["input_ids"]])
    with torch.no_grad(), returning_attention(model):
        outputs: Any = model(input_ids=ids)
    length = ids.shape[1]
    for number, weights in enumerate(outputs.get("attentions") or [None]):
        shape = None if weights is None else list(weights.shape)
        if shape is None or shape[:1] + shape[2:] != [1, length, length] or weights.min() < 0 or (weights.sum(-1) - 1).abs().max() > 1e-3:
            raise ExportError(
                f"{type(model).__name__} returns {shape or 'none'} as the attention of layer {number}, not [1, heads, {length}, {length}] "
                "with a sum of 1 for each token; export it without --attentions."
            )
    return tuple(int(weights.shape[1]) for weights in outputs["attentions"])
