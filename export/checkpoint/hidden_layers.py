"""The layers of an encoder that an embedding graph gives out: which a model has, and which of them were asked for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import LAST_FOUR, Layers


def choose_layers(model: PreTrainedModel, tokenizer: Any, layers: Layers) -> Layers:
    """Makes an encoder return the layers that are asked for; returns them as a manifest has them.

    Args:
        model: The encoder, which may run from now on.
        tokenizer: Gives it a text.
        layers: By name, or by the numbers of transformers' `hidden_states`: 0 for what the embeddings give, negative ones from the end.

    Returns:
        The name, or the numbers from 0 on, ascending, and with the last layer, which the graph gives out anyway.

    Raises:
        CheckpointError: It does not have them, or not of the shape of its last one.
    """
    if layers == "last":
        return layers
    if layers == "last_four" and (count := model.config.num_hidden_layers) < LAST_FOUR:
        raise CheckpointError(f"the model has {count} layers, and --layers last_four needs {LAST_FOUR}; leave it out.")
    model.config.output_hidden_states = True
    if layers == "last_four":
        return layers
    depth = _depth(model, tokenizer)
    if other := [layer for layer in layers if not -depth - 1 <= layer <= depth]:
        raise CheckpointError(
            f"--layers names {other[0]}, and the model has the layers 1 to {depth}, and 0 for what its embeddings give; or from the end -1 to "
            f"{-depth - 1}."
        )
    numbers = [layer % (depth + 1) for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise CheckpointError(f"--layers names a layer twice: {','.join(map(str, layers))}; name each once.")
    return tuple(sorted({*numbers, depth})) if numbers != [depth] else "last"


def number_layers(asked: Layers, given: Layers) -> tuple[int, ...]:
    """Returns the layers that were asked for in their order, numbered as the manifest numbers them.

    Args:
        asked: What `choose_layers` took.
        given: What it returned for that.
    """
    if isinstance(asked, str):
        return (-1,) if asked == "last" else tuple(range(-LAST_FOUR, 0))
    return (-1,) if isinstance(given, str) else tuple(layer % (given[-1] + 1) for layer in asked)


def _depth(model: PreTrainedModel, tokenizer: Any) -> int:
    """Returns the number of layers, counted on a text."""
    with torch.no_grad():
        outputs: Any = model(input_ids=torch.tensor([tokenizer("a")["input_ids"]]))
    last, states = outputs.last_hidden_state, outputs.hidden_states
    if states is None or any(state.shape != last.shape for state in states):
        shapes = [] if states is None else [list(state.shape) for state in states]
        raise CheckpointError(
            f"{type(model).__name__} has layers of other shapes than its last one's {list(last.shape)}: {shapes}; export it without --layers."
        )
    return len(states) - 1
