"""What a checkpoint says about its embeddings: pooling, normalizing, prompts and length, from sentence-transformers' files.

    modules.json                        the steps: Transformer, Pooling, Normalize
    1_Pooling/config.json               how the tokens' vectors become one
    sentence_bert_config.json           the length in tokens
    config_sentence_transformers.json   what is put before texts of a kind

The file of the length lies with the model, which may have a folder of its own (`export/checkpoint/modules_json.py`); older ones are called by the
model, as `sentence_roberta_config.json`. A checkpoint without `modules.json` is pooled as Text Embeddings Inference does by default,
with the first token's vector, which is [CLS], not normalized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from export.checkpoint import modules_json
from export.errors import CheckpointError
from service.bundle.graph_spec import OutputSpec
from service.bundle.manifest import Embedding, Layers, Pooling

LAST_FOUR = 4
OUTPUTS = {
    "last": (OutputSpec(name="last_hidden_state", kind="per_token"),),
    "last_four": (OutputSpec(name="last_hidden_state", kind="per_token"), OutputSpec(name="last_four_hidden_states", kind="per_token")),
}
# sentence-transformers' name of a pooling, in its older files within `pooling_mode_..._token(s)`
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max"}


@dataclass(frozen=True)
class Sentences:
    """What sentence-transformers' files say.

    Attributes:
        pooling: How the tokens' vectors become one.
        normalize: Whether vectors are brought to length 1.
        max_length: Length in tokens, or None.
        prompts: Name -> what is put before a text of that kind.
        default_prompt: Name of the one for texts of no kind, or None.
    """

    pooling: Pooling = "cls"
    normalize: bool = False
    max_length: int | None = None
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None

    def embedding(self, model: PreTrainedModel, layers: Layers) -> Embedding:
        """Returns what the manifest says of it."""
        return Embedding(
            pooling=self.pooling,
            normalize=self.normalize,
            dimensions=model.config.hidden_size,
            layers=layers,
            prompts=self.prompts or {},
            default_prompt=self.default_prompt,
        )


def read(folder: Path, transformer: Path) -> Sentences:
    """Reads a checkpoint's sentence-transformers files, if it has any.

    Args:
        folder: The checkpoint's folder.
        transformer: That of its model, the same or one within it.

    Raises:
        CheckpointError: A file is broken, or asks for what the service does not do.
    """
    pooling: Pooling = "cls"
    normalize = False
    for step in modules_json.read(folder):
        if step.kind == "Pooling":
            pooling = _pooling(step.folder / "config.json")
        elif step.kind == "Normalize":
            normalize = True
        elif step.kind != modules_json.TRANSFORMER:
            raise CheckpointError(
                f"`{folder / modules_json.MODULES_FILE}` has a step `{step.kind}`; known are Transformer, Pooling and Normalize. "
                "Its vectors cannot be served."
            )
    kinds = modules_json.document(folder / "config_sentence_transformers.json", {})
    return Sentences(
        pooling=pooling,
        normalize=normalize,
        max_length=_max_length(transformer),
        prompts=kinds.get("prompts"),
        default_prompt=kinds.get("default_prompt_name"),
    )


def drop_pooler(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Takes the layer on [CLS] out of an encoder, which no embedding reads; returns the missing weights that are not its own.

    A checkpoint of another head has none, and what transformers makes up for it would be random.
    """
    if isinstance(getattr(model, "pooler", None), torch.nn.Module):
        # some models' code calls it without looking, so that there must be one
        model.pooler = torch.nn.Identity()
    return {name for name in missing if not name.startswith("pooler.")}


def give_layers(model: PreTrainedModel, layers: Layers) -> None:
    """Makes an encoder give out what `output` needs of it.

    Raises:
        CheckpointError: It has fewer than four layers.
    """
    if layers == "last_four":
        count = model.config.num_hidden_layers
        if count < LAST_FOUR:
            raise CheckpointError(f"the model has {count} layers, and --layers last_four needs {LAST_FOUR}; leave it out.")
        model.config.output_hidden_states = True


def output(outputs: Any, name: str) -> torch.Tensor:
    """Returns a model's output by the name that the graph has for it, [rows, length, values]."""
    if name == OUTPUTS["last_four"][1].name:
        # the last one from where it is an output, since some models normalize it after the last layer
        return torch.cat([*outputs.hidden_states[-LAST_FOUR:-1], outputs.last_hidden_state], dim=-1)
    tensor: torch.Tensor = outputs[name]
    return tensor


def _max_length(transformer: Path) -> int | None:
    """Reads the length in tokens; of several files the one that is usual, as sentence-transformers does."""
    usual = transformer / "sentence_bert_config.json"
    path = next((path for path in (usual, *sorted(transformer.glob("sentence_*_config.json"))) if path.is_file()), usual)
    config = modules_json.document(path, {})
    if config.get("do_lower_case"):
        raise CheckpointError(
            f"`{path}` sets `do_lower_case`, which is not known; let the tokenizer lower the case and save the checkpoint again."
        )
    length: int | None = config.get("max_seq_length")
    return length


def _pooling(path: Path) -> Pooling:
    """Reads how a Pooling step pools."""
    config = modules_json.document(path, None)
    if config is None:
        raise CheckpointError(f"`{path}` is missing, which modules.json names; copy the checkpoint whole.")
    given = config.get("pooling_mode")
    if given is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in flags]
    else:
        modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise CheckpointError(f"`{path}` pools by {' and '.join(modes) or 'nothing'}; known is one of {', '.join(_POOLINGS)}.")
    if config.get("include_prompt") is False:
        raise CheckpointError(f"`{path}` leaves the prompt's tokens out of pooling, which is not known; its vectors cannot be served.")
    return _POOLINGS[modes[0]]
