"""Reads the embedding settings in sentence-transformers' files of a checkpoint: pooling, normalization, prompts and length.

    modules.json                        the modules that a text passes: Transformer, Pooling, Normalize
    1_Pooling/config.json               the pooling of the tokens' vectors
    sentence_bert_config.json           the length in tokens
    config_sentence_transformers.json   prompts for kinds of texts

`modules.json` has the folder of each module:

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]

The path of the Transformer is empty if the model is in the folder of `modules.json`. Older checkpoints have it in a subfolder
`0_Transformer`, with tokenizer and length; a `config.json` next to `modules.json` is then not the model's. Older files with the length have
the model's name, such as `sentence_roberta_config.json`. A checkpoint without `modules.json` gets Text Embeddings Inference's default
pooling: the vector of the first token, [CLS], not normalized.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.manifest import Embedding, Pooling

MODULES_FILE = "modules.json"
TRANSFORMER, POOLING = "Transformer", "Pooling"

# sentence-transformers' names of pooling; in its older files they are within `pooling_mode_..._token(s)`
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max"}

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


def _read_object(path: Path) -> dict[str, Any]:
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


def read_sentence_settings(folder: Path, model_folder: Path, dimensions: int) -> tuple[Embedding, int | None]:
    """Reads a checkpoint's sentence-transformers files, if any.

    Args:
        folder: The checkpoint's folder.
        model_folder: The folder of its model, which is this folder or a subfolder.
        dimensions: Values of a token's vector.

    Returns:
        The manifest's entry for the embedding, with the last layer only, and the maximum length in tokens or None.

    Raises:
        CheckpointError: A file is broken, or needs an unsupported feature.
    """
    pooling: Pooling = "cls"
    normalize = False
    for entry in read_modules(folder):
        if entry.kind == POOLING:
            pooling = _read_pooling(entry.folder / "config.json")
        elif entry.kind == "Normalize":
            normalize = True
        elif entry.kind != TRANSFORMER:
            raise CheckpointError(
                f"`{folder / MODULES_FILE}` has the step `{entry.kind}`, which is not supported; supported are Transformer, "
                "Pooling and Normalize."
            )
    prompts, default_prompt = _read_prompts(folder / "config_sentence_transformers.json")
    embedding = Embedding(pooling=pooling, normalize=normalize, dimensions=dimensions, prompts=prompts, default_prompt=default_prompt)
    return embedding, _read_max_length(model_folder)


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts by name, and the name of the default prompt, if any."""
    settings = _read_object(path)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"`prompts` in `{path}` is {json.dumps(prompts)}; it must be an object of texts.")
    if default is not None and default not in list(prompts):
        raise CheckpointError(f"`default_prompt_name` in `{path}` is {json.dumps(default)}, which is not in `prompts`; name one of them.")
    return prompts, default


def _read_max_length(model_folder: Path) -> int | None:
    """Reads the maximum length in tokens; if there are several files, it uses the same one as sentence-transformers."""
    usual = model_folder / "sentence_bert_config.json"
    path = next((path for path in (usual, *sorted(model_folder.glob("sentence_*_config.json"))) if path.is_file()), usual)
    config = _read_object(path)
    if config.get("do_lower_case"):
        raise CheckpointError(
            f"`{path}` sets `do_lower_case`, which is not supported; let the tokenizer make lowercase, and save the checkpoint again."
        )
    for name, options in config.items():
        is_options = name.endswith(("_args", "_kwargs")) and isinstance(options, dict)
        if is_options and (changes := set(options) - _HARMLESS_OPTIONS):
            raise CheckpointError(
                f"`{path}` sets {', '.join(f'`{option}`' for option in sorted(changes))} in `{name}`, which is not supported; put such settings "
                "into config.json or tokenizer_config.json, and remove them here."
            )
    length: int | None = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(f"`max_seq_length` in `{path}` is {json.dumps(length)}; it must be a number of tokens or null.")
    return length


def _read_pooling(path: Path) -> Pooling:
    """Reads the pooling mode of a Pooling module's `config.json`."""
    if not path.is_file():
        raise CheckpointError(f"`{path}`, which modules.json names, is missing; copy the whole checkpoint.")
    config = _read_object(path)
    mode = config.get("pooling_mode")
    if mode is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in flags]
    else:
        modes = [str(entry) for entry in (mode if isinstance(mode, list) else [mode])]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise CheckpointError(f"`{path}` pools by {' and '.join(modes) or 'nothing'}; supported is one of {', '.join(_POOLINGS)}.")
    if config.get("include_prompt") is False:
        raise CheckpointError(f"`{path}` leaves the tokens of the prompt out of pooling, which is not supported.")
    return _POOLINGS[modes[0]]
