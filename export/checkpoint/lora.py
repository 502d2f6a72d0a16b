"""LoRA adapters: reads the files that peft saves, and merges the adapter with peft into the weights of its base model.

A merged matrix is `W + scale * B @ A` (LoRA, Hu et al. 2021, arXiv:2106.09685), or that matrix with its rows scaled to trained magnitudes
(DoRA, Liu et al. 2024, arXiv:2402.09353). Fully trained heads and biases replace those of the model. All other adapters are
refused, because a wrong merge would give wrong answers without an error. For the same reason, peft gets a configuration with only
supported settings, never the adapter's own file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.checkpoint.weight_files import read_weights
from bertserve.export.errors import CheckpointError, MissingPackageError
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.errors import install_command

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE, PICKLE = "adapter_model.safetensors", "adapter_model.bin"  # versions of peft before 0.7 wrote the second one

# Settings of peft 0.21 that can have any value: settings that are read here, or follow from the tensors' names and shapes, ...
_READ = {
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "lora_alpha",
    "r",
    "rank_pattern",
    "target_modules",
    "modules_to_save",
}
# ... and those about the training, which do not affect the trained adapter.
_OF_TRAINING = {
    "auto_mapping",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
}
# Settings that affect the merge, with their supported values. All others must be off, because an unknown setting may
# affect it too; peft writes unused settings as null, false or empty.
_UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "bias": ("none", "all", "lora_only", None),
    # the initialization; other values, such as pissa and olora, also change the model's weights
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "use_dora": (True, False, None),
    "use_rslora": (True, False, None),
}
_OFF: tuple[Any, ...] = (None, False, {}, [], "")
_MAX_SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True)
class LowRankUpdate:
    """The trained update of one linear layer.

    Attributes:
        a: Float [rank, inputs].
        b: Float [outputs, rank].
        magnitude: DoRA's lengths of the rows of the merged matrix, [outputs]; None for LoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None

    @property
    def rank(self) -> int:
        """Rank of the update."""
        return self.a.shape[0]

    @property
    def is_consistent(self) -> bool:
        """Whether the shapes match."""
        if self.a.ndim != 2 or self.b.ndim != 2 or self.b.shape[1] != self.rank:
            return False
        return self.magnitude is None or self.magnitude.shape == self.b.shape[:1]


@dataclass(frozen=True)
class LoraAdapter:
    """The content of an adapter's folder.

    Attributes:
        folder: The folder.
        weights: The file of its weights.
        base_model: Folder or hub id of its base model.
        base_revision: Hub revision of the base model, if any.
        task: The task of its training, or `auto`.
        alpha: Numerator of the scale.
        use_rslora: Whether the scale's denominator is the square root of the rank instead of the rank.
        use_dora: Whether it has magnitudes.
        updates: Name of a linear layer -> its update.
        full_parameters: Fully trained parameters, by name.
    """

    folder: Path
    weights: Path
    base_model: str
    base_revision: str | None
    task: str
    alpha: float
    use_rslora: bool
    use_dora: bool
    updates: dict[str, LowRankUpdate]
    full_parameters: dict[str, torch.Tensor]

    def label_count(self, model: PreTrainedModel) -> int | None:
        """Returns the number of labels of the trained head, if the model has another number; only the model's shapes are read."""
        parameters = dict(model.named_parameters())
        counts = {
            tensor.shape[0]
            for name, tensor in self.full_parameters.items()
            if name in parameters and tensor.shape != parameters[name].shape and tensor.shape[1:] == parameters[name].shape[1:]
        }
        return counts.pop() if len(counts) == 1 else None

    def merge(self, model: PreTrainedModel) -> set[str]:
        """Merges the adapter into a model, in place, and returns the names of the parameters that it replaced.

        Raises:
            CheckpointError: The adapter does not match the model.
        """
        self._check_layers(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._check_full_parameters(model, parameters)
        self._check_shared_weights(model, parameters)
        _merge_with_peft(self, model)
        with torch.no_grad():
            for name, tensor in self.full_parameters.items():
                parameters[name].copy_(tensor)
        return set(self.full_parameters)

    def _check_layers(self, model: PreTrainedModel) -> None:
        """Refuses updates of layers that the model lacks, or has with other shapes."""
        layers = dict(model.named_modules())
        for name, update in self.updates.items():
            layer = layers.get(name)
            if not isinstance(layer, torch.nn.Linear):
                raise CheckpointError(
                    f"the adapter `{self.folder.name}` changes `{name}`, which is not a linear layer of {type(model).__name__}."
                )
            if (update.b.shape[0], update.a.shape[1]) != tuple(layer.weight.shape):
                raise CheckpointError(
                    f"the adapter `{self.folder.name}` changes `{name}` by {update.b.shape[0]} x {update.a.shape[1]}, "
                    f"but the layer is {' x '.join(map(str, layer.weight.shape))}; it was trained on another model than "
                    f"`{self.base_model}`."
                )

    def _check_full_parameters(self, model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Refuses parameters that the model lacks, or has with other shapes."""
        for name, tensor in self.full_parameters.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise CheckpointError(
                    f"the adapter `{self.folder.name}` has `{name}` of shape {list(tensor.shape)}, which {type(model).__name__} has "
                    f"{'as ' + str(list(parameters[name].shape)) if name in parameters else 'not'}; give the right --task or model."
                )

    def _check_shared_weights(self, model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Refuses to change a matrix in one of two places, such as the embedding of a language model: peft trained a copy for one of them.

        A shared bias was trained as one parameter, and stays shared.
        """
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in parameters.items():
            names.setdefault(parameter, []).append(name)
        for name in (*(f"{layer}.weight" for layer in self.updates), *self.full_parameters):
            aliases = [alias for alias in names[parameters[name]] if alias != name]
            if aliases and parameters[name].ndim > 1:
                raise CheckpointError(
                    f"the adapter `{self.folder.name}` changes only `{name}`, which {type(model).__name__} shares with "
                    f"`{aliases[0]}`; this is not supported: merge the adapter with peft, and export a checkpoint in which "
                    "the two are separate (`tie_word_embeddings`)."
                )


def read_adapter(folder: Path) -> LoraAdapter | None:
    """Returns the adapter in a folder, or None if there is none.

    Raises:
        CheckpointError: It cannot be read, or is neither LoRA nor DoRA; the message names the unsupported setting.
        MissingPackageError: peft is not installed.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the adapter `{folder.name}` cannot be read: {error}; save it again.") from error
    weights = next((folder / name for name in (WEIGHTS_FILE, PICKLE) if (folder / name).is_file()), folder / WEIGHTS_FILE)
    tensors = read_weights(folder.name, weights)
    _check_settings(folder, config)
    use_dora = bool(config.get("use_dora"))
    updates, full_parameters = _sort_tensors(folder, tensors, use_dora=use_dora)
    if find_spec("peft") is None:
        raise MissingPackageError(f"`{folder.name}` is a LoRA adapter; merging it needs peft: {install_command('lora')}")
    return LoraAdapter(
        folder=folder,
        weights=weights,
        base_model=str(config["base_model_name_or_path"]),
        base_revision=config.get("revision"),
        task=next((task.name for task in TASKS.values() if task.lora_type and task.lora_type == config.get("task_type")), "auto"),
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=use_dora,
        updates=updates,
        full_parameters=full_parameters,
    )


def _check_settings(folder: Path, config: Any) -> None:
    """Refuses adapters other than LoRA, unsupported settings, and a missing name of the base model."""
    if not isinstance(config, dict):
        raise CheckpointError(f"the adapter `{folder.name}` cannot be read: {CONFIG_FILE} is not a JSON object; save it again.")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"the adapter `{folder.name}` has the type {config.get('peft_type')}, but only LORA is supported; merge it with peft."
        )
    for setting in sorted(config.keys() - _READ - _OF_TRAINING):
        if config[setting] not in _UNDERSTOOD.get(setting, _OFF):
            value = repr(config[setting])
            raise CheckpointError(
                f"the adapter `{folder.name}` has `{setting}` = {value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + '…'}, "
                "which is not supported; merge it with peft and export the result."
            )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"the adapter `{folder.name}` has `lora_alpha` = {alpha!r} in {CONFIG_FILE}, which must be a number; save it again."
        )
    if not config.get("base_model_name_or_path"):
        raise CheckpointError(
            f"the adapter `{folder.name}` does not name the model that it was trained on; set `base_model_name_or_path` in {CONFIG_FILE}."
        )


def _sort_tensors(
    folder: Path, tensors: dict[str, torch.Tensor], *, use_dora: bool
) -> tuple[dict[str, LowRankUpdate], dict[str, torch.Tensor]]:
    """Returns an adapter's updates by layer, and the fully trained parameters."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    full_parameters = {}
    part_names = {"A.weight", "B.weight"} | ({"magnitude_vector"} if use_dora else set())
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.")
        for wrapper in (".modules_to_save.default.", ".modules_to_save.", ".base_layer."):  # peft's wrappers around the model's modules
            name = name.replace(wrapper, ".")
        if ".original_module." in name:
            continue  # with `bias` = all, this includes biases of the model's own head, which the trained head replaces
        layer, infix, part = name.rpartition(".lora_")
        if not infix:
            full_parameters[name] = tensor
        elif part in part_names:
            parts.setdefault(layer, {})[part] = tensor
        else:
            raise CheckpointError(f"the adapter `{folder.name}` has a tensor `{key}`, which is not supported; only linear layers are.")
    for layer, layer_parts in parts.items():
        if not {"A.weight", "B.weight"} <= layer_parts.keys():
            raise CheckpointError(f"the adapter `{folder.name}` lacks one of the two matrices of `{layer}`; save it again.")
        if layer_parts.keys() != part_names:
            raise CheckpointError(f"the adapter `{folder.name}` lacks the magnitudes of `{layer}`, and has `use_dora`; save it again.")
    updates = {
        layer: LowRankUpdate(layer_parts["A.weight"], layer_parts["B.weight"], layer_parts.get("magnitude_vector"))
        for layer, layer_parts in parts.items()
    }
    inconsistent = [layer for layer, update in updates.items() if not update.is_consistent]
    if inconsistent:
        raise CheckpointError(f"the adapter `{folder.name}` has tensors of `{inconsistent[0]}` whose shapes do not match; save it again.")
    return updates, full_parameters


def _merge_with_peft(adapter: LoraAdapter, model: PreTrainedModel) -> None:
    if not adapter.updates:
        return
    # importing peft takes seconds, and it is optional
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel
    from peft.utils import set_peft_model_state_dict

    config = LoraConfig(
        target_modules="|".join(map(re.escape, adapter.updates)),  # a string is a regular expression for the whole name of a layer
        rank_pattern={f"^{re.escape(name)}": update.rank for name, update in adapter.updates.items()},
        lora_alpha=adapter.alpha,  # annotated as an integer, but peft only divides it
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
    )
    tuner = LoraModel(model, {"default": config}, "default")
    tensors: dict[str, torch.Tensor] = {}
    for name, update in adapter.updates.items():
        tensors |= {f"model.{name}.lora_A.weight": update.a, f"model.{name}.lora_B.weight": update.b}
        if update.magnitude is not None:
            tensors[f"model.{name}.lora_magnitude_vector"] = update.magnitude
    unexpected = set_peft_model_state_dict(tuner, tensors).unexpected_keys
    assert not unexpected, unexpected  # the layers were checked above
    tuner.merge_and_unload()
