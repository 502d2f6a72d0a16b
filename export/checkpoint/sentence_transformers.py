"""Reads sentence-transformers' files of a checkpoint: its modules, and the settings of its encoder and of its answers.

    modules.json                        the modules that a text passes: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json               the pooling of the tokens' vectors; most modules have such a file
    sentence_bert_config.json           the length in tokens, and other settings of the Transformer
    config_sentence_transformers.json   prompts, truncation and similarity of vectors, and the function of a cross-encoder

`modules.json` has the folder of each module:

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]

The path of the Transformer is empty if the model is in the folder of `modules.json`. Older checkpoints have it in a subfolder
`0_Transformer`, with tokenizer and length; a `config.json` next to `modules.json` is then not the model's. Older files with the length have
the model's name, such as `sentence_roberta_config.json`.

An unknown setting may change the answers, so it is refused, and so is an unsupported value of a known one. `sentence_head.py` reads the
modules after the Transformer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import Similarity

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER, POOLING, DENSE, NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"

_MODEL_TYPES = ("SentenceTransformer", "CrossEncoder")  # not sparse vectors, and not one vector per token
_SETTINGS = {
    *("prompts", "default_prompt_name", "truncate_dim", "similarity_fn_name", "activation_fn", "model_type"),
    *("__version__", "requirements", "keep_in_fp32_modules"),  # these do not change answers
}
_TRANSFORMER_SETTINGS = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "unpad_inputs"}
# the supported kinds of Transformer -> the output that it reads, and its name for the next module
_TRANSFORMER_TASKS = {"feature-extraction": ("last_hidden_state", "token_embeddings"), "sequence-classification": ("logits", "scores")}

# options of loading that change neither weights nor configuration nor tokens; all models run in float32 with eager attention
_HARMLESS_OPTIONS = {
    "attn_implementation",
    "device_map",
    "dtype",
    "low_cpu_mem_usage",
    "torch_dtype",
    "trust_remote_code",
    "use_fast",
    "use_safetensors",
}


@dataclass(frozen=True)
class SentenceSettings:
    """The settings in sentence-transformers' files, without those of modules after the Transformer.

    Attributes:
        max_length: Maximum length in tokens, if any.
        lowercase: Whether texts are made lowercase before the tokenizer reads them.
        activation_fn: Name of the class that a cross-encoder applies to its logits, if any.
        prompts: Name -> text to put before a text of that kind.
        default_prompt: Name of the default prompt, if any.
        truncate_dim: Number of values to which vectors are cut, if any.
        similarity: The function that compares vectors.
    """

    max_length: int | None
    lowercase: bool
    activation_fn: str | None
    prompts: dict[str, str]
    default_prompt: str | None
    truncate_dim: int | None
    similarity: Similarity


@dataclass(frozen=True)
class ModuleEntry:
    """One entry of `modules.json`.

    Attributes:
        kind: Last part of its type: `Transformer`, `Pooling`, `Normalize` or another.
        folder: Folder of its files, if any.
    """

    kind: str
    folder: Path


def read_modules(folder: Path) -> tuple[ModuleEntry, ...]:
    """Reads the modules of a checkpoint; empty without a `modules.json`.

    Raises:
        CheckpointError: `modules.json` is broken, or names a folder outside of the checkpoint or code of its own.
    """
    entries = read_json(folder / MODULES_FILE, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"`{folder / MODULES_FILE}` is not a list of steps; download it again.")
    return tuple(_entry(folder, str(entry.get("type", "")), str(entry.get("path", ""))) for entry in entries)


def find_transformer(folder: Path) -> Path:
    """Returns the folder of a checkpoint's model: its own folder, or the one that `modules.json` names.

    Raises:
        CheckpointError: `modules.json` is broken, or names several models or a folder that does not exist.
    """
    folders = [entry.folder for entry in read_modules(folder) if entry.kind == TRANSFORMER] or [folder]
    if len(folders) > 1:
        names = ", ".join(f"`{path.name}`" for path in folders)
        raise CheckpointError(f"`{folder / MODULES_FILE}` has {len(folders)} Transformer steps ({names}); only one is supported.")
    if not folders[0].is_dir():
        raise CheckpointError(f"the folder `{folders[0]}`, which {MODULES_FILE} names, is missing; copy the whole checkpoint.")
    return folders[0]


def read_json(path: Path, default: Any) -> Any:
    """Returns a JSON file's content, or `default` if there is no such file.

    Raises:
        CheckpointError: It is not JSON, or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no such file."""
    document = read_json(path, {})
    if not isinstance(document, dict):
        raise CheckpointError(f"`{path}` is not a JSON object; download it again.")
    return document


def _entry(folder: Path, kind: str, path: str) -> ModuleEntry:
    package, _, name = kind.rpartition(".")
    if package and package.partition(".")[0] != "sentence_transformers":
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has the step `{kind}`, which is code of the checkpoint and never run; write the model as a module of "
            "your own and export it with --module."
        )
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(f"`{folder / MODULES_FILE}` names `{path}`, which is outside of the checkpoint; name a folder inside it.")
    return ModuleEntry(name, folder / parts)


def refuse_settings(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses settings that are not known, unless they are null.

    Raises:
        CheckpointError: A setting of the file is unknown.
    """
    if unknown := sorted(f"`{name}`" for name, value in settings.items() if name not in known and value is not None):
        raise CheckpointError(
            f"`{path}` sets {', '.join(unknown)}, which is not supported and may change the answers; remove it if it does not."
        )


def read_sentence_settings(folder: Path, model_folder: Path) -> SentenceSettings:
    """Reads a checkpoint's settings from `folder`, and those of its Transformer from `model_folder`, the same folder or a subfolder.

    Raises:
        CheckpointError: A file is broken, or has an unsupported setting.
    """
    path = folder / SETTINGS_FILE
    settings = read_object(path)
    refuse_settings(path, settings, _SETTINGS)
    prompts, default_prompt = _read_prompts(path, settings)
    model_type: Any = settings.get("model_type", _MODEL_TYPES[0])
    similarity: Any = settings.get("similarity_fn_name") or "cosine"
    for name, value, allowed in (("model_type", model_type, _MODEL_TYPES), ("similarity_fn_name", similarity, get_args(Similarity))):
        if value not in allowed:
            raise CheckpointError(f"`{name}` in `{path}` is {json.dumps(value)}; supported are {', '.join(allowed)}.")
    path = model_folder / "sentence_bert_config.json"
    if not path.is_file():  # if there are several other files, it is the same one as in sentence-transformers
        path = next(iter(sorted(model_folder.glob("sentence_*_config.json"))), path)
    transformer = read_object(path)
    _check_transformer(path, transformer)
    return SentenceSettings(
        max_length=_read_count(path, transformer, "max_seq_length", "tokens"),
        lowercase=bool(transformer.get("do_lower_case")),
        activation_fn=None if settings.get("activation_fn") is None else str(settings["activation_fn"]),
        prompts=prompts,
        default_prompt=default_prompt,
        truncate_dim=_read_count(folder / SETTINGS_FILE, settings, "truncate_dim", "values"),
        similarity=similarity,
    )


def _read_prompts(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Returns the prompts by name, and the name of the default prompt, if any."""
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"`prompts` in `{path}` is {json.dumps(prompts)}; it must be an object of texts.")
    if default is not None and default not in list(prompts):
        raise CheckpointError(f"`default_prompt_name` in `{path}` is {json.dumps(default)}, which is not in `prompts`; name one of them.")
    return prompts, default


def _read_count(path: Path, settings: Mapping[str, Any], name: str, unit: str) -> int | None:
    count: int | None = settings.get(name)
    if count is not None and (type(count) is not int or count < 1):
        raise CheckpointError(f"`{name}` in `{path}` is {json.dumps(count)}; it must be a number of {unit} or null.")
    return count


def _check_transformer(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuses settings that change the tokens, the model or the output that it gives to the next module."""
    options = {name: value for name, value in settings.items() if name.endswith(("_args", "_kwargs"))}
    for name, values in options.items():
        changes = set(values) - (_HARMLESS_OPTIONS if name != "processing_kwargs" else set()) if isinstance(values, dict) else set()
        if changes:
            raise CheckpointError(
                f"`{path}` sets {', '.join(f'`{option}`' for option in sorted(changes))} in `{name}`, which is not supported; put such settings "
                "into config.json or tokenizer_config.json, and remove them here."
            )
    refuse_settings(path, settings, {*_TRANSFORMER_SETTINGS, *options})
    task = settings.get("transformer_task", "feature-extraction")
    if task not in _TRANSFORMER_TASKS:
        raise CheckpointError(f"`transformer_task` in `{path}` is {json.dumps(task)}; supported are {', '.join(_TRANSFORMER_TASKS)}.")
    output, name = _TRANSFORMER_TASKS[task]
    expected = {"method": "forward", "method_output_name": output}
    modalities = settings.get("modality_config", {"text": expected})
    for setting, value, supported in (
        ("modality_config", modalities.get("text") if isinstance(modalities, dict) else modalities, expected),
        ("module_output_name", settings.get("module_output_name", name), name),
    ):
        if value != supported:
            raise CheckpointError(
                f"`{setting}` in `{path}` is {json.dumps(settings[setting])}; for texts only {json.dumps(supported)} is supported."
            )


def check_cross_encoder(folder: Path, settings: SentenceSettings) -> None:
    """Refuses modules after a model with a head, and a prompt that sentence-transformers puts before its texts.

    The modules of vectors do not belong to the head, if its encoder also has vectors.

    Raises:
        CheckpointError: There is such a module or prompt.
    """
    kinds = [entry.kind for entry in read_modules(folder)]
    if POOLING not in kinds and (others := [kind for kind in kinds if kind != TRANSFORMER]):
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has the step `{others[0]}`, which is not supported for this task; only {TRANSFORMER} is."
        )
    if settings.default_prompt is not None and settings.prompts[settings.default_prompt]:
        raise CheckpointError(
            f"`default_prompt_name` in `{folder / SETTINGS_FILE}` is {json.dumps(settings.default_prompt)}, but prompts are only supported for "
            "embeddings; remove it."
        )
