"""The signature of a checkpoint's graph: its inputs and outputs by name, and how each output is read off the PyTorch model's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec
from bertserve.service.bundle.manifest import LAST_FOUR, Embedding, Task

INPUTS: dict[str, InputSpec] = {
    "input_ids": InputSpec(name="input_ids", fill="token_ids"),
    "attention_mask": InputSpec(name="attention_mask", fill="attention_mask"),
    "token_type_ids": InputSpec(name="token_type_ids", fill="type_ids"),
}
MASK_INDEX = InputSpec(name="mask_index", fill="mask_index")
ATTENTION_INDEX = InputSpec(name="attention_index", fill="attention_index")

LAST_FOUR_LAYERS = "last_four_hidden_states"
LAYERS = "hidden_states_"  # and their numbers
ATTENTIONS = OutputSpec(name="attentions", kind="per_map")
LAYER_ATTENTION = "attentions_"  # and the layer's number, from 0


def model_inputs(model: PreTrainedModel, tokenizer: Any) -> tuple[InputSpec, ...]:
    """Returns the inputs that a model takes and its tokenizer fills, in the order of the model's own `forward`.

    Raises:
        CheckpointError: The model reads no token ids, or needs an input that is not in `INPUTS`, or the tokenizer gives one.
    """
    parameters = inspect.signature(model.forward).parameters
    if model.main_input_name not in INPUTS:
        raise CheckpointError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only models of text are exported.")
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in INPUTS
    ]
    if needed:
        raise CheckpointError(
            f"{type(model).__name__} needs inputs that are not understood: {', '.join(needed)}; known are {', '.join(INPUTS)}."
        )
    unknown = [name for name in tokenizer.model_input_names if name not in INPUTS]
    if unknown:
        raise CheckpointError(f"the tokenizer gives inputs that are not understood: {', '.join(unknown)}.")
    # the tracer passes inputs by position
    return tuple(INPUTS[name] for name in parameters if name in INPUTS and name in tokenizer.model_input_names)


def graph_outputs(task: Task, embedding: Embedding | None) -> tuple[OutputSpec, ...]:
    """Returns the outputs of a task's graph; an embedding's says which layers."""
    outputs = TASKS[task].outputs
    if embedding is None or embedding.layers == "last":
        return outputs
    return (*outputs, OutputSpec(name=embedding.layers_output, kind="per_token"))


def read_output(outputs: Any, name: str) -> torch.Tensor:
    """Returns one output of a model by its name in the graph, float32 [rows, ...].

    Args:
        outputs: What the model's `forward` returned.
        name: The graph's name of the output.
    """
    if name == LAST_FOUR_LAYERS or name.startswith(LAYERS):
        # the last one is read from `last_hidden_state`, because some models normalize it after the last layer
        states = (*outputs.hidden_states[:-1], outputs.last_hidden_state)
        chosen = range(-LAST_FOUR, 0) if name == LAST_FOUR_LAYERS else map(int, name.removeprefix(LAYERS).split("_"))
        return torch.cat([states[layer] for layer in chosen], dim=-1)
    if name.startswith(LAYER_ATTENTION):
        weights: torch.Tensor = outputs["attentions"][int(name.removeprefix(LAYER_ATTENTION))]
        return weights
    tensor: torch.Tensor = outputs[name]
    return tensor
