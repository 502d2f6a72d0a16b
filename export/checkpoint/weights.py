"""Loads a checkpoint's weights into its model, and refuses weights that do not match: a model with random parts would still answer.

transformers only warns of unexpected weights, which the model cannot use. A classifier without the pooler of its pretraining is
complete. But a classifier without an encoder layer, or without an LSTM after the encoder, differs from the trained model. So an unexpected
weight is harmless only if transformers has a model of this configuration with another head that has the weight.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import torch
from transformers import AutoModel, AutoModelForNextSentencePrediction, AutoModelForPreTraining, PreTrainedModel

from bertserve.export.checkpoint.source import SourceFiles, read_with_transformers
from bertserve.export.checkpoint.task_head import classes_by_model_type, find_auto_class
from bertserve.export.checkpoint.weight_files import read_pickle
from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.manifest import Task
from bertserve.service.messages import plural

# names of the modules of BERT, RoBERTa, ELECTRA and DistilBERT; the last one of each reads the heads
_ATTENTION_PART = re.compile(r"(?:^|\.)layer\.(\d+)\.attention\.(?:(?P<head>self\.(?:query|key|value)|[qkv]_lin)|output\.dense|out_lin)$")
# buffers, and TinyBERT's comparison with the layers of its teacher, which is only for training
_HARMLESS = ("position_ids", "*.position_ids", "fit_dense.*")


def load_pretrained(files: SourceFiles, task: Task, auto_class: Any, config: Any, ignored_weights: Sequence[str] = ()) -> PreTrainedModel:
    """Returns the model in float32 and evaluation mode, with eager attention and a merged adapter.

    Unused weights whose names match a pattern in `ignored_weights` are allowed.
    """
    source, adapter = files.source, files.adapter
    is_pickle = files.weights[0].suffix == ".bin"
    if is_pickle:
        for path in files.weights:
            read_pickle(source, path, device="meta")  # refuses other objects
    with prune_while_loading(source, config):
        model, report = read_with_transformers(
            f"the weights of `{source}`",
            auto_class.from_pretrained,
            files.model_folder,
            config=config,
            use_safetensors=not is_pickle,
            weights_only=True,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below with a better message
        )
    replaced = set() if adapter is None else adapter.merge(model)
    mismatched = sorted((entry for entry in report["mismatched_keys"] if entry[0] not in replaced), key=lambda entry: entry[0])
    if mismatched:  # transformers would replace them by random ones
        name, shape, configured = mismatched[0]
        raise ExportError(
            f"`{source}` has {plural(len(mismatched), 'weight')} with another shape than configured: `{name}` is {list(shape)}, not "
            f"{list(configured)}; fix config.json (`vocab_size`, the labels, `hidden_size` and the like), or use its own weights."
        )
    missing = set(report["missing_keys"]) - replaced
    if EXPORT_TASKS[task].embeds:
        # embeddings do not use a layer for [CLS], which checkpoints for other heads lack; the code of some models always calls it
        missing = {name for name in missing if not name.startswith("pooler.")}
        if isinstance(getattr(model, "pooler", None), torch.nn.Module):
            model.pooler = torch.nn.Identity()
    if missing:
        raise ExportError(
            f"`{source}` lacks weights that {task} needs: {', '.join(sorted(missing)[:3])}; it was not fine-tuned for this task, or its "
            f"architecture {config.architectures or ''} is not {type(model).__name__}; give the right --task or checkpoint."
        )
    refuse_unexpected_weights(source, report["unexpected_keys"], model, ignored_weights)
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ExportError(f"`{source}` has NaN or infinite weights in `{name}`; the training diverged.")
    return model.eval()


def refuse_unexpected_weights(source: str, unexpected: Collection[str], model: PreTrainedModel, ignored: Sequence[str] = ()) -> None:
    """Refuses weights that the model should have used; `ignored` lists the user's patterns of names of harmless weights."""
    names = sorted(name for name in unexpected if not any(fnmatchcase(name, pattern) for pattern in (*_HARMLESS, *ignored)))
    if not names:
        return
    patterns = {_without_layer_numbers(name) for name in model.state_dict()}
    extra_layer_names = [name for name in names if _without_layer_numbers(name) in patterns]
    if extra_layer_names:
        raise ExportError(
            f"`{source}` has weights of more layers than its config.json says: {len(extra_layer_names)} would not be used, such as "
            f"`{extra_layer_names[0]}`; set `num_hidden_layers`, or save the shortened model again with `save_pretrained`."
        )
    modules = {name for name, _ in model.named_modules()}
    other_heads = _names_with_other_heads(model)
    unknown_names = [name for name in names if name not in other_heads or name.rpartition(".")[0] in modules]
    if unknown_names:
        flags = " ".join(f"--ignore-weights '{pattern}'" for pattern in dict.fromkeys(map(_without_layer_numbers, unknown_names)))
        raise ExportError(
            f"`{source}` has {plural(len(unknown_names), 'weight')} that its architecture does not use, such as `{unknown_names[0]}`, and "
            "would answer without them; set the right architecture in config.json, merge or remove the weights, export the module with "
            f"--module, or, if they do not matter, pass {flags}."
        )


def _names_with_other_heads(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights of all transformers models for a configuration, with and without the encoder's prefix."""
    names: set[str] = set()
    config: Any = model.config
    for auto_class in (*map(find_auto_class, EXPORT_TASKS.values()), AutoModelForNextSentencePrediction, AutoModelForPreTraining):
        if config.model_type not in classes_by_model_type(auto_class):
            continue
        try:
            with torch.device("meta"):  # only names are needed
                other_model = auto_class.from_config(config, attn_implementation="eager")
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError):
            continue  # this head does not support the configuration
        weights = set(other_model.state_dict())
        prefix = f"{other_model.base_model_prefix}."
        names |= weights | {name.removeprefix(prefix) for name in weights} | {prefix + name for name in weights if auto_class is AutoModel}
    return names


def _without_layer_numbers(name: str) -> str:
    """Returns a weight's name with `*` instead of layer numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@contextmanager
def prune_while_loading(source: str, config: Any) -> Iterator[None]:
    """Makes models that are created in the block lack the pruned heads of their configuration.

    transformers 4 writes `pruned_heads`, layer -> heads, and transformers 5 ignores them, so the shapes of its matrices would be wrong.
    Modules with unknown names stay unchanged; the shapes of their weights then differ, which is refused during loading.
    """
    pruned = getattr(config, "pruned_heads", None) or {}
    try:
        removed = {int(layer): set(map(int, heads)) for layer, heads in pruned.items() if heads}
        all_heads = set(range(config.num_attention_heads)) if removed else set()
        if any(not heads < all_heads for heads in removed.values()):
            raise ValueError
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(
            f"`pruned_heads` of `{source}` is {pruned!r}; it must be an object of layer -> some of its heads, but not all; fix config.json."
        ) from error
    head_counts = {layer: len(all_heads - heads) for layer, heads in removed.items()}  # the remaining ones
    post_init = PreTrainedModel.post_init

    def prune(model: PreTrainedModel) -> None:
        for name, module in list(model.named_modules()):
            match = _ATTENTION_PART.search(name)
            if match is not None and isinstance(module, torch.nn.Linear) and int(match[1]) in head_counts:
                size = head_counts[int(match[1])] * (config.hidden_size // config.num_attention_heads)
                rows, columns = (size, module.in_features) if match["head"] else (module.out_features, size)
                model.set_submodule(name, torch.nn.Linear(columns, rows, bias=module.bias is not None))
        post_init(model)

    with mock.patch.object(PreTrainedModel, "post_init", prune):
        yield
