"""LoRA adapters: reads the files that peft saves, and merges the adapter with peft into the weights of its base model.

A merged matrix is `W + scale * B @ A` (LoRA, Hu et al. 2021, arXiv:2106.09685), or that matrix with its rows scaled to trained magnitudes
(DoRA, Liu et al. 2024, arXiv:2402.09353). Fully trained heads and biases replace the model's. All other adapters are
refused, because a wrong merge would give wrong answers without an error. For the same reason, peft gets a configuration with only
supported settings, never the adapter's own file.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.checkpoint.sentence_transformers import read_object
from bertserve.export.checkpoint.weight_files import read_weights
from bertserve.export.errors import ExportError, UsageError
from bertserve.service.bundle.checkpoint_files import ADAPTER_CONFIG_FILE
from bertserve.service.messages import install_command
from bertserve.service.tasks import classify, question_answering, token_classification

ADAPTER_WEIGHTS_FILE, PICKLED_ADAPTER = "adapter_model.safetensors", "adapter_model.bin"  # versions of peft before 0.7 wrote the second one

# peft's task names -> tasks; peft's other tasks are not supported
_TASKS = {"SEQ_CLS": classify.TASK, "TOKEN_CLS": token_classification.TASK, "QUESTION_ANS": question_answering.TASK}

# Settings of peft 0.21 that can have any value: they are read here, or follow from the tensors' names and shapes, or are
# only about the training, and do not affect the trained adapter.
_FREE_SETTINGS = {
    "task_type", "base_model_name_or_path", "revision", "lora_alpha", "r", "rank_pattern", "target_modules", "modules_to_save",
    "auto_mapping", "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "runtime_config",
}  # fmt: skip
# Settings that affect the merge, with their supported values. All others must be off, because an unknown setting can
# affect it too; peft writes unused settings as null, false or empty.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only", None),
    # the initialization; other values, such as pissa and olora, also change the model's weights
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "use_dora": (True, False, None),
    "use_rslora": (True, False, None),
}
_UNUSED_VALUES: tuple[Any, ...] = (None, False, {}, [], "")

# peft's names of the trained tensors of a linear layer: float [rank, inputs], float [outputs, rank], and DoRA's lengths of the rows of the
# merged matrix, float [outputs]
_A, _B, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class LoraAdapter:
    """The content of an adapter's folder.

    Attributes:
        base_model: Folder or hub id of its base model.
        base_revision: Hub revision of the base model, if any.
        task: The task of its training, or `auto`.
        scaling: The settings of peft's `LoraConfig` that scale the updates.
        updates: Name of a linear layer -> peft's name -> trained tensor.
    """

    folder: Path
    weights: Path
    base_model: str
    base_revision: str | None
    task: str
    scaling: dict[str, Any]
    updates: dict[str, dict[str, torch.Tensor]]
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
        """Merges the adapter into a model, in place, and returns the names of the parameters that it replaced."""
        self._check_shared_weights(model)
        try:
            unexpected = [*self._merge_updates(model), *model.load_state_dict(self.full_parameters, strict=False).unexpected_keys]
            reason = f"the model has no `{unexpected[0]}`" if unexpected else ""
        except (RuntimeError, ValueError) as error:  # other shapes, or updates of layers that are not linear
            reason = " ".join(str(error).split())
        if reason:
            raise ExportError(
                f"the adapter `{self.folder.name}` does not fit {type(model).__name__}: {reason}; give its own base model and --task."
            )
        return set(self.full_parameters)

    def _merge_updates(self, model: PreTrainedModel) -> list[str]:
        """Merges the updates of linear layers; returns the names of the layers that the model lacks."""
        if not self.updates:
            return []
        # importing peft takes seconds, and it is optional
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
        from peft.utils import set_peft_model_state_dict

        config = LoraConfig(
            target_modules="|".join(map(re.escape, self.updates)),  # a string is a regular expression for the whole name of a layer
            rank_pattern={f"^{re.escape(name)}": len(update[_A]) for name, update in self.updates.items()},
            **self.scaling,
        )
        tuner = LoraModel(model, {"default": config}, "default")
        tensors = {f"model.{name}.{part}": tensor for name, update in self.updates.items() for part, tensor in update.items()}
        unexpected: list[str] = set_peft_model_state_dict(tuner, tensors).unexpected_keys
        tuner.merge_and_unload()
        return unexpected

    def _check_shared_weights(self, model: PreTrainedModel) -> None:
        """Refuses to change a matrix in one of two places, such as the embedding of a language model: peft trained a copy for one of them.

        A shared bias was trained as one parameter, and stays shared.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in (*(f"{layer}.weight" for layer in self.updates), *self.full_parameters):
            matrix = parameters.get(name)
            aliases = [alias for alias, other in parameters.items() if other is matrix and alias != name]
            if matrix is not None and aliases and matrix.ndim > 1:
                raise ExportError(
                    f"the adapter `{self.folder.name}` changes only `{name}`, which {type(model).__name__} shares with `{aliases[0]}`; "
                    "merge it with peft into a checkpoint in which the two are separate (`tie_word_embeddings`)."
                )


def read_adapter(folder: Path) -> LoraAdapter | None:
    """Returns the adapter in a folder, or None if there is none."""
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        return None
    config = read_object(folder / ADAPTER_CONFIG_FILE)
    files = [name for name in (ADAPTER_WEIGHTS_FILE, PICKLED_ADAPTER) if (folder / name).is_file()]
    weights = folder / next(iter(files), ADAPTER_WEIGHTS_FILE)
    tensors = read_weights(folder.name, weights)
    _check_settings(folder, config)
    use_dora = bool(config.get("use_dora"))
    updates, full_parameters = _sort_tensors(folder, tensors, use_dora=use_dora)
    if find_spec("peft") is None:
        raise UsageError(f"`{folder.name}` is a LoRA adapter; merging it needs peft: {install_command('lora')}", exit_code=3)
    return LoraAdapter(
        folder=folder,
        weights=weights,
        base_model=str(config["base_model_name_or_path"]),
        base_revision=config.get("revision"),
        task=_TASKS.get(str(config.get("task_type")), "auto"),
        scaling={"lora_alpha": config["lora_alpha"], "use_rslora": bool(config.get("use_rslora")), "use_dora": use_dora},
        updates=updates,
        full_parameters=full_parameters,
    )


def _check_settings(folder: Path, config: dict[str, Any]) -> None:
    """Refuses adapters other than LoRA, unsupported settings, and a missing name of the base model."""
    for setting in sorted({"peft_type", *config} - _FREE_SETTINGS):
        if config.get(setting) not in _SUPPORTED_VALUES.get(setting, _UNUSED_VALUES):
            raise ExportError(f"the adapter `{folder.name}` has `{setting}` = {config.get(setting)!r:.80}; merge it with peft first.")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ExportError(f"the adapter `{folder.name}` has `lora_alpha` = {alpha!r} in {ADAPTER_CONFIG_FILE}, which must be a number.")
    if not config.get("base_model_name_or_path"):
        raise ExportError(f"the adapter `{folder.name}` names no base model; set `base_model_name_or_path` in {ADAPTER_CONFIG_FILE}.")


def _sort_tensors(
    folder: Path, tensors: dict[str, torch.Tensor], *, use_dora: bool
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Returns an adapter's updates by layer, and the fully trained parameters."""
    updates: dict[str, dict[str, torch.Tensor]] = {}
    full_parameters = {}
    part_names = {_A, _B} | ({_MAGNITUDE} if use_dora else set())
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.")
        for wrapper in (".modules_to_save.default.", ".modules_to_save.", ".base_layer."):  # peft's wrappers around the model's modules
            name = name.replace(wrapper, ".")
        if ".original_module." in name:
            continue  # with `bias` = all, this includes biases of the model's own head, which the trained head replaces
        layer, infix, part = name.rpartition(".lora_")
        if not infix:
            full_parameters[name] = tensor
        elif f"lora_{part}" in part_names:
            updates.setdefault(layer, {})[f"lora_{part}"] = tensor
        else:
            raise ExportError(f"the adapter `{folder.name}` has a tensor `{key}`, which is not supported; only linear layers are.")
    for layer, update in updates.items():
        if update.keys() != part_names:
            missing = ", ".join(sorted(part_names - update.keys()))
            raise ExportError(f"the adapter `{folder.name}` lacks `{missing}` of `{layer}`; save it again.")
    return updates, full_parameters
