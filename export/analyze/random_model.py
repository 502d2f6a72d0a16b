"""A checkpoint of random weights from a configuration: how long a run takes does not depend on the weights' values.

It is an encoder without a head and without a tokenizer, so that all layers are whole and every text is as long as it is said to be.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, BertConfig, PreTrainedModel, initialization

from bertserve.export.analyze.shapes import NAMED, Shape
from bertserve.export.checkpoint.card_metadata import CardMetadata
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.signature import INPUTS
from bertserve.export.checkpoint.source import read_with_transformers
from bertserve.export.errors import CheckpointError
from bertserve.export.tasks import feature_extraction

_SPREAD = 0.05  # of the random weights
_DEFAULT_LENGTH = 512


def read_config(source: str) -> Any:
    """Returns the configuration of a named shape, or of a `config.json` or its folder.

    Raises:
        CheckpointError: It cannot be read, or does not say the shape.
    """
    if source in NAMED:
        return with_shape(BertConfig(), NAMED[source])
    path = Path(source)
    config = read_with_transformers(f"the configuration `{source}`", AutoConfig.from_pretrained, path if path.is_dir() else path.absolute())
    shape_of(config)
    return config


def shape_of(config: Any) -> Shape:
    """Returns the shape that a configuration has.

    Raises:
        CheckpointError: It does not say its layers, heads or hidden size.
    """
    values = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(value, int) for value in values):
        raise CheckpointError(
            f"a {type(config).__name__} does not say its layers, heads and hidden size, {values}; give a BERT-like encoder's."
        )
    inner = _inner_name(config)
    layers, heads, hidden = (int(value) for value in values if value is not None)
    return Shape(layers, heads, hidden, None if inner is None else int(getattr(config, inner)))


def with_shape(config: Any, shape: Shape) -> Any:
    """Returns a copy of a configuration with another shape."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers, changed.num_attention_heads, changed.hidden_size = shape.layers, shape.heads, shape.hidden
    inner = _inner_name(config)
    if inner is not None and shape.inner is not None:
        setattr(changed, inner, shape.inner)
    return changed


def random_checkpoint(config: Any) -> Checkpoint:
    """Returns an encoder of random weights, as the stages of an export take it.

    Raises:
        CheckpointError: transformers has no encoder of this configuration, or none that reads token ids.
    """
    try:
        # ordinary ones take a hundred times as long to draw
        with initialization.no_init_weights():
            model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"transformers makes no encoder of this {type(config).__name__} ({shape_of(config)}): {error}.") from error
    _fill(model)
    taken = inspect.signature(model.forward).parameters
    if model.main_input_name not in INPUTS:
        raise CheckpointError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only models of text are analyzed.")
    return Checkpoint(
        name=type(config).__name__,
        source="random weights",
        revision=None,
        commit=None,
        weights_sha256="",
        model=model,
        task=feature_extraction.TASK.name,
        inputs=tuple(INPUTS[name] for name in taken if name in INPUTS),
        outputs=feature_extraction.TASK.outputs,
        labels=(),
        activation="none",
        tokenizer=None,
        tokenizer_json="",
        added_tokens=(),
        max_length=int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH),
        pad_id=config.pad_token_id or 0,
        padding_side="right",
        single=(),
        pair=(),
        cls_index=None,
        subword_prefix=None,
        mask=None,
        card=None,
        card_metadata=CardMetadata(),
    )


def _inner_name(config: Any) -> str | None:
    """Returns the name of the field that has the feed-forward block's size, which has no common one."""
    return next((name for name in ("intermediate_size", "hidden_dim", "ffn_dim") if isinstance(getattr(config, name, None), int)), None)


def _fill(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-_SPREAD, _SPREAD, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
