"""LoRA adapters as PEFT saves them, merged into the weights of the model that they were trained on. Needs no peft.

A merged matrix is `W + scale * B @ A` (Hu et al. 2021, arXiv:2106.09685); heads and biases that were trained whole replace those of
the model. What is not plain LoRA on linear layers is refused: merged wrongly it would answer wrongly, and nothing would show it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from export.errors import CheckpointError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TASKS = {"SEQ_CLS": "text-classification", "TOKEN_CLS": "token-classification", "QUESTION_ANS": "question-answering"}

# settings that change what is to be merged, and the values under which it is plain LoRA
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    # others, as pissa and olora, change the weights of the model too
    "init_lora_weights": (True, False, "gaussian", None),
}


@dataclass(frozen=True)
class LoraAdapter:
    """What an adapter's folder holds.

    Attributes:
        folder: The folder.
        base_model: Folder or hub id of the model that it was trained on.
        base_revision: Hub revision of that model, if any.
        task: The task that it was trained for, or `auto`.
        alpha: Numerator of the scale.
        use_rslora: Whether the scale's denominator is the root of the rank, and not the rank.
        pairs: By the name of a linear layer its A, [rank, inputs], and its B, [outputs, rank].
        full_parameters: Parameters that were trained in full, by name.
    """

    folder: Path
    base_model: str
    base_revision: str | None
    task: str
    alpha: float
    use_rslora: bool
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    full_parameters: dict[str, torch.Tensor]

    def label_count(self, model: PreTrainedModel) -> int | None:
        """Returns the number of labels of the trained head, if the model has another number.

        Args:
            model: The model with its own number of labels; only shapes are looked at.
        """
        parameters = dict(model.named_parameters())
        others = {
            tensor.shape[0]
            for name, tensor in self.full_parameters.items()
            if name in parameters and tensor.shape != parameters[name].shape and tensor.shape[1:] == parameters[name].shape[1:]
        }
        return others.pop() if len(others) == 1 else None

    def merge(self, model: PreTrainedModel) -> set[str]:
        """Merges the adapter into a model, in place, and returns the names of the parameters that it replaced in full.

        Raises:
            CheckpointError: It is for another model.
        """
        layers, parameters = dict(model.named_modules()), dict(model.named_parameters())
        with torch.no_grad():
            for name, (a, b) in self.pairs.items():
                layer = layers.get(name)
                if not isinstance(layer, torch.nn.Linear):
                    raise CheckpointError(
                        f"the adapter `{self.folder.name}` changes `{name}`, which is no linear layer of {type(model).__name__}."
                    )
                if (b.shape[0], a.shape[1]) != tuple(layer.weight.shape):
                    raise CheckpointError(
                        f"the adapter `{self.folder.name}` changes `{name}` by {b.shape[0]} x {a.shape[1]}, and the layer is "
                        f"{' x '.join(map(str, layer.weight.shape))}; it was trained on another model than `{self.base_model}`."
                    )
                rank = a.shape[0]
                layer.weight += self.alpha / (math.sqrt(rank) if self.use_rslora else rank) * (b.float() @ a.float())
            for name, tensor in self.full_parameters.items():
                if name not in parameters or parameters[name].shape != tensor.shape:
                    raise CheckpointError(
                        f"the adapter `{self.folder.name}` has `{name}` of shape {list(tensor.shape)}, which {type(model).__name__} has "
                        f"{'as ' + str(list(parameters[name].shape)) if name in parameters else 'not'}; give the right --task or model."
                    )
                parameters[name].copy_(tensor)
        return set(self.full_parameters)


def read_adapter(folder: Path) -> LoraAdapter | None:
    """Returns the adapter of a folder, or None where it holds none.

    Raises:
        CheckpointError: It cannot be read, or is not plain LoRA; the message says which setting is not understood.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter `{folder.name}` cannot be read: {error}. It needs {CONFIG_FILE} and {WEIGHTS_FILE}; pickled weights are never loaded."
        ) from error
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"the adapter `{folder.name}` is of type {config.get('peft_type')}; only LORA is understood: merge it with peft."
        )
    for setting, plain in _PLAIN.items():
        if config.get(setting) not in plain:
            raise CheckpointError(
                f"the adapter `{folder.name}` has `{setting}` = {config[setting]!r}, which is not understood; merge it with peft and export the result."
            )
    base = config.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"the adapter `{folder.name}` does not say on which model it was trained; set `base_model_name_or_path` in {CONFIG_FILE}."
        )
    pairs, full_parameters = _sort_tensors(folder, tensors)
    return LoraAdapter(
        folder=folder,
        base_model=str(base),
        base_revision=config.get("revision"),
        task=TASKS.get(config.get("task_type") or "", "auto"),
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        pairs=pairs,
        full_parameters=full_parameters,
    )


def _sort_tensors(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """Returns an adapter's pairs of small matrices by layer, and the parameters that were trained in full."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    full_parameters = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        layer, half, kind = name.rpartition(".lora_")
        if not half:
            full_parameters[name] = tensor
        elif kind in ("A.weight", "B.weight"):
            halves.setdefault(layer.replace(".base_layer", ""), {})[kind[0]] = tensor
        else:
            raise CheckpointError(f"the adapter `{folder.name}` has a tensor `{key}`, which is not understood; only linear layers are.")
    lone = [layer for layer, found in halves.items() if len(found) != 2]
    if lone:
        raise CheckpointError(f"the adapter `{folder.name}` lacks one of the two matrices of `{lone[0]}`; save it again.")
    return {layer: (found["A"], found["B"]) for layer, found in halves.items()}, full_parameters
