"""Reads the purpose of a checkpoint: its task, the class that loads it, its labels, and the function from logits to scores.

`adapt_head` gives every head the form that later stages expect: inputs of [rows, length], and outputs with the graph's names. It adds
hooks, so the model's own code runs unchanged, in PyTorch and in both tracers. `export/tasks` states the requirements of each task.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from bertserve.export.checkpoint.lora import LoraAdapter
from bertserve.export.checkpoint.sentence_transformers import SETTINGS_FILE
from bertserve.export.checkpoint.source import read_with_transformers
from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.tasks.export_task import ExportTask
from bertserve.service.bundle.manifest import Activation, Task
from bertserve.service.tasks import multiple_choice

OTHER_HEADS: dict[str, dict[Task, Any]] = {
    # the architecture's name, or its end from "For" -> the tasks of its heads, the default one first, and the classes that load them
    "ForNextSentencePrediction": {"text-classification": transformers.AutoModelForNextSentencePrediction},
    "AlbertForPreTraining": {"fill-mask": transformers.AutoModelForMaskedLM, "text-classification": transformers.AutoModelForPreTraining},
    "ElectraForPreTraining": {"token-classification": transformers.AutoModelForPreTraining},
    # the classes with only one of the heads have the same modules with the same names
    **{
        f"{family}ForPreTraining": {
            "fill-mask": transformers.AutoModelForMaskedLM,
            "text-classification": transformers.AutoModelForNextSentencePrediction,
        }
        for family in ("Bert", "Ernie", "FNet", "MegatronBert", "MobileBert")
    },
}
FIXED_LABELS = {
    # suffix of the loaded class's name -> transformers' fixed labels of its head by id, which config.json cannot change
    "ForNextSentencePrediction": ("is_next", "not_next"),
    "AlbertForPreTraining": ("in_order", "swapped"),
    "ElectraForPreTraining": ("original", "replaced"),
}
_CROSS_ENCODER_FUNCTIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


def choose_task(config: Any, task: str, adapter: LoraAdapter | None) -> tuple[Task, Any]:
    """Returns the task and the auto class that loads it, and gives an adapter's head to `config`; `auto` reads the architecture."""
    if adapter is not None and task == "auto":
        task = adapter.task
    if adapter is None or task == "auto":
        return _task_of_model(config, task)
    config.architectures = None  # the model's own head can be missing, or for another task
    task_name, auto_class = _task_of_model(config, task)
    with torch.device("meta"):  # creates only shapes
        model = read_with_transformers(
            "the configuration of the adapter's model",
            lambda _, **__: auto_class.from_config(config, attn_implementation="eager"),
            adapter.folder,
        )
    count = adapter.label_count(model)
    if count is not None:
        config.num_labels = count
    return task_name, auto_class


def fixed_labels(model: PreTrainedModel) -> tuple[str, ...] | None:
    """Returns the labels by id of a head with fixed labels, whose scores are a softmax; None for any other head."""
    return next((labels for suffix, labels in FIXED_LABELS.items() if type(model).__name__.endswith(suffix)), None)


def read_labels(source: str, config: Any) -> tuple[str, ...]:
    """Returns the names of the labels by id. Numbers and booleans become strings as with Python's `str`, as in the pipeline's results."""
    names = [config.id2label[i] for i in sorted(config.id2label)]
    labels = tuple(str(name) if isinstance(name, str | int | float) else "" for name in names)
    if sorted(config.id2label) != list(range(len(labels))) or len(set(labels)) != len(labels) or "" in labels:
        raise ExportError(f"the labels of `{source}` are not distinct names for the ids 0 to {len(labels) - 1}: {config.id2label}.")
    return labels


def read_activation(config: Any, setting: str | None = None) -> Activation:
    """Returns the function from logits to scores: that of a cross-encoder, or by the rule of the Hugging Face text-classification pipeline.

    `setting` is the name of its class in the settings file of sentence-transformers, which has priority over older fields in config.json.
    """
    default: Activation = "softmax"
    if config.problem_type == "regression":
        default = "none"
    elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
        default = "sigmoid"
    settings = getattr(config, "sentence_transformers", None)
    older_setting = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = setting or older_setting or getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        return default
    package, _, function = str(name).rpartition(".")
    if not package.startswith("torch.nn") or function not in _CROSS_ENCODER_FUNCTIONS:
        raise ExportError(
            f"`{name}` of {SETTINGS_FILE} or config.json is not supported as the function from logits to scores, only "
            f"{' and '.join(_CROSS_ENCODER_FUNCTIONS)} of `torch.nn`; change it, or remove it to get {default}."
        )
    activation = _CROSS_ENCODER_FUNCTIONS[function]
    if activation == default or (activation == "none" and config.num_labels > 1):
        return default  # Identity is the default for several labels, whose scores then follow the pipeline's rule
    if config.problem_type is not None:
        raise ExportError(f"the activation is `{name}`, but {default} by `problem_type` = {config.problem_type!r}; remove one of them.")
    return activation


def adapt_head(model: PreTrainedModel, task: Task) -> None:
    """Adapts a loaded model to the inputs and outputs of its task's graphs; most models need no change."""
    if task == multiple_choice.TASK:
        _take_choices_as_rows(model)
    elif isinstance(model, transformers.AlbertForPreTraining):
        _return_sentence_order_logits(model)
    elif isinstance(model, transformers.ElectraForPreTraining):
        model.register_forward_hook(_add_original_logit)


def _task_of_model(config: Any, task: str) -> tuple[Task, Any]:
    """Returns the task and the auto class that loads it, from the architecture's name or the user's choice."""
    architectures = config.architectures or []
    trained_for = _heads(architectures)
    task_name = next(iter(trained_for), None) if task == "auto" else task
    if task_name is None:
        raise ExportError(f"unknown task of architecture {architectures or 'none'}; give --task, one of {', '.join(EXPORT_TASKS)}.")
    if task_name not in EXPORT_TASKS:
        raise ExportError(f"unknown task `{task_name}`; give --task one of {', '.join(EXPORT_TASKS)}.")
    # every model with a head contains an encoder
    if trained_for and task_name not in trained_for and not EXPORT_TASKS[task_name].embeds:
        raise ExportError(f"it is a {architectures[0]}, made for {' and '.join(trained_for)}; --task {task_name} does not match it.")
    auto_class = trained_for.get(task_name, find_auto_class(EXPORT_TASKS[task_name]))
    has_decoder = getattr(config, "is_encoder_decoder", False) or any(name.endswith("EncoderModel") for name in architectures)
    if EXPORT_TASKS[task_name].embeds and has_decoder and config.model_type in classes_by_model_type(transformers.AutoModelForTextEncoding):
        auto_class = transformers.AutoModelForTextEncoding  # T5's decoder has inputs that do not come from a text
    if config.model_type not in classes_by_model_type(auto_class):
        raise ExportError(f"transformers has no {task_name} head for a {type(config).__name__} ({architectures or 'no architecture'}).")
    return task_name, auto_class


def classes_by_model_type(auto_class: Any) -> Mapping[str, Any]:
    """Returns the names of the classes that an auto class loads, by model type."""
    tables = {name.replace("_", ""): table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    return tables[f"{auto_class.__name__.removeprefix('Auto')}MappingNames".upper()]


def find_auto_class(task: ExportTask) -> Any:
    """Returns the auto class that loads models with a task's head."""
    return getattr(transformers, f"AutoModel{task.head.removeprefix('Model')}")


def _heads(architectures: list[str]) -> dict[Task, Any]:
    """Returns the tasks of an architecture's heads with the classes that load them, the default first; empty if unknown."""
    for name in architectures:
        heads = OTHER_HEADS.get(name) or OTHER_HEADS.get(name[max(name.find("For"), 0) :])
        if heads is not None:
            return heads
        for task in EXPORT_TASKS.values():
            # language models ("LMHeadModel") are not plain encoders; XLNet's heads, for example, have other suffixes
            is_named = name.endswith(task.head) and "HeadModel" not in name
            # BART, a text generator, was not made to fill masks, though it can
            is_mapped = name in classes_by_model_type(find_auto_class(task)).values() and "ForConditionalGeneration" not in name
            if is_named or is_mapped:
                return {task.name: find_auto_class(task)}
    return {}


def _take_choices_as_rows(model: PreTrainedModel) -> None:
    """Makes a model take [rows, length], with one choice per row, and return `logits` [rows, 1].

    The model's own code reads [rows, choices, length] and reshapes the choices into rows, which a graph does not need. So the encoder gets
    the original inputs, and the reshaped ones are not used.
    """
    encoder = model.base_model
    names = list(inspect.signature(encoder.forward).parameters)
    original_inputs: dict[str, torch.Tensor] = {}

    def add_axis(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        original_inputs.update(inputs)
        return args, {name: value[:, None] for name, value in inputs.items()}

    def restore_inputs(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = {**dict(zip(names, args, strict=False)), **inputs, **original_inputs}
        original_inputs.clear()
        return (), arguments

    model.register_forward_pre_hook(add_axis, with_kwargs=True)
    encoder.register_forward_pre_hook(restore_inputs, with_kwargs=True)


def _return_sentence_order_logits(model: Any) -> None:
    """Makes ALBERT's pretraining class return the `logits` [rows, 2] of sentence order, and skip its other head."""
    labels = model.sop_classifier.classifier.out_features
    if labels != 2:
        raise ExportError(f"the head for sentence order has {labels} labels in config.json; supported are 2: in order, and swapped.")
    model.predictions = torch.nn.Identity()

    def rename_logits(module: Any, args: Any, output: Any) -> Any:
        output["logits"] = output["sop_logits"]
        return output

    model.register_forward_hook(rename_logits)


def _add_original_logit(module: Any, args: Any, output: Any) -> Any:
    """Converts ELECTRA's logits [rows, length] to `logits` [rows, length, 2] for the tags original and replaced.

    The sigmoid of its logit x is the probability that a token was replaced, and the softmax over 0 and x is 1 - sigmoid(x) and sigmoid(x).
    """
    replaced = output["logits"]
    output["logits"] = torch.stack([torch.zeros_like(replaced), replaced], dim=-1)
    return output
