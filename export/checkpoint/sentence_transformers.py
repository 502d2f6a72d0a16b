"""Reads sentence-transformers' files of a checkpoint: its modules, and the settings of its encoder and of its answers.

    modules.json                        the modules that a text passes: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json               the pooling of the tokens' vectors; most modules have such a file
    sentence_bert_config.json           the length in tokens, and other settings of the Transformer
    config_sentence_transformers.json   prompts, truncation and similarity of vectors, and the function of a cross-encoder

Older checkpoints have the Transformer in a subfolder `0_Transformer`, with tokenizer and length; a `config.json` next to `modules.json` is
then not the model's. Older files with the length have the model's name, such as `sentence_roberta_config.json`.

An unknown setting could change the answers, so it is refused, and so is an unsupported value of a known one. `sentence_head.py` reads the
modules after the Transformer.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PositiveInt, ValidationError, ValidationInfo, field_validator

from bertserve.export.errors import ExportError
from bertserve.service.bundle.checkpoint_files import MODULES_FILE
from bertserve.service.bundle.manifest import Similarity
from bertserve.service.messages import describe_validation_error, quote_names

SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER, POOLING, DENSE, NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"

# the supported kinds of Transformer -> the output that it reads, and its name for the next module
_TRANSFORMER_TASKS = {"feature-extraction": ("last_hidden_state", "token_embeddings"), "sequence-classification": ("logits", "scores")}
# options of loading that change neither weights nor configuration nor tokens; all models run in float32 with eager attention
_Option = Literal[
    "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype", "trust_remote_code", "use_fast", "use_safetensors"
]
_Options = dict[_Option, Any]


class SettingsFile(BaseModel):
    """The settings in a JSON file; `null` stands for a setting's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file; all settings have their defaults if there is none."""
        try:
            return cls.model_validate({name: value for name, value in read_object(path).items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            raise ExportError(
                f"`{path}` cannot be used, because its settings may change the answers: {describe_validation_error(first)} (it is "
                f"{json.dumps(first['input'])}); fix it, or remove it if it changes nothing."
            ) from error


class SentenceSettings(SettingsFile):
    """The settings of vectors and of a cross-encoder's scores.

    Attributes:
        activation_fn: Name of the class that a cross-encoder applies to its logits, if any.
        prompts: Name -> text to put before a text of that kind.
        default_prompt: Name of the default prompt, if any.
        truncate_dim: Number of values to which vectors are cut, if any.
        model_type: The kind of model; models with sparse vectors, or with one vector per token, are refused.
    """

    activation_fn: str | None = None
    prompts: dict[str, str] = Field(default={})
    default_prompt: str | None = Field(default=None, alias="default_prompt_name")
    truncate_dim: PositiveInt | None = None
    similarity: Similarity = Field(default="cosine", alias="similarity_fn_name")
    model_type: Literal["SentenceTransformer", "CrossEncoder"] = "SentenceTransformer"
    # these do not change answers
    version: Any = Field(default=None, alias="__version__")
    requirements: Any = None
    keep_in_fp32_modules: Any = None

    @field_validator("default_prompt")
    @classmethod
    def _is_a_prompt(cls, name: str, info: ValidationInfo) -> str:
        if name not in info.data.get("prompts", {}):
            raise ValueError("it is not in `prompts`; name one of them")
        return name


class TransformerSettings(SettingsFile):
    """The settings of the Transformer.

    Attributes:
        max_length: Maximum length in tokens, if any.
        lowercase: Whether texts are made lowercase before the tokenizer reads them.
    """

    max_length: PositiveInt | None = Field(default=None, alias="max_seq_length")
    lowercase: bool = Field(default=False, alias="do_lower_case")
    transformer_task: Literal["feature-extraction", "sequence-classification"] = "feature-extraction"
    modality_config: dict[str, Any] | None = None
    module_output_name: str | None = None
    unpad_inputs: Any = None
    processing_kwargs: dict[str, Any] = Field(default={}, max_length=0)
    # the names of older and of newer versions
    model_options: _Options = Field(default={}, validation_alias=AliasChoices("model_args", "model_kwargs"))
    tokenizer_options: _Options = Field(default={}, validation_alias=AliasChoices("tokenizer_args", "processor_kwargs"))
    config_options: _Options = Field(default={}, validation_alias=AliasChoices("config_args", "config_kwargs"))

    @field_validator("modality_config", "module_output_name")
    @classmethod
    def _is_of_the_task(cls, value: Any, info: ValidationInfo) -> Any:
        output, name = _TRANSFORMER_TASKS[info.data.get("transformer_task", "feature-extraction")]
        expected = {"method": "forward", "method_output_name": output} if isinstance(value, dict) else name
        if (value.get("text") if isinstance(value, dict) else value) != expected:
            raise ValueError(f"for texts, only {json.dumps(expected)} is supported")
        return value


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the kind of each module of a checkpoint, such as `Pooling`, and its folder; empty without a `modules.json`."""
    entries = _read_json(folder / MODULES_FILE, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ExportError(f"`{folder / MODULES_FILE}` is not a list of modules; download it again.")
    modules = []
    for entry in entries:
        package, _, kind = str(entry.get("type", "")).rpartition(".")
        path = PurePosixPath(str(entry.get("path", "")))
        if package and package.partition(".")[0] != "sentence_transformers":
            raise ExportError(
                f"`{folder / MODULES_FILE}` has the module `{package}.{kind}`, which is code of the checkpoint and never run; write a "
                "PyTorch module of your own and export it with --module."
            )
        if path.is_absolute() or ".." in path.parts:
            raise ExportError(f"`{folder / MODULES_FILE}` names `{path}`, which is outside of the checkpoint; name a folder inside it.")
        modules.append((kind, folder / path))
    return modules


def find_transformer(folder: Path) -> Path:
    """Returns the folder of a checkpoint's model: its own folder, or the one that `modules.json` names."""
    folders = [path for kind, path in read_modules(folder) if kind == TRANSFORMER] or [folder]
    if len(folders) > 1:
        names = quote_names(path.name for path in folders)
        raise ExportError(f"`{folder / MODULES_FILE}` has {len(folders)} Transformer modules, {names}; only one is supported.")
    if not folders[0].is_dir():
        raise ExportError(f"the folder `{folders[0]}`, which {MODULES_FILE} names, is missing; copy the whole checkpoint.")
    return folders[0]


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no such file."""
    document = _read_json(path, {})
    if not isinstance(document, dict):
        raise ExportError(f"`{path}` is not a JSON object; download it again.")
    return document


def _read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise ExportError(f"`{path}` cannot be read: {error}.") from error


def read_transformer_settings(folder: Path) -> TransformerSettings:
    """Reads the settings of the Transformer in a folder."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():  # if there are several other files, it is the same one as in sentence-transformers
        path = next(iter(sorted(folder.glob("sentence_*_config.json"))), path)
    return TransformerSettings.read(path)


def check_cross_encoder(folder: Path, settings: SentenceSettings) -> None:
    """Refuses modules after a model with a head, and a prompt that sentence-transformers puts before its texts.

    With a Pooling module, `modules.json` describes the encoder's embeddings, not the head, and is ignored.
    """
    kinds = {kind for kind, _ in read_modules(folder)}
    if POOLING not in kinds and kinds - {TRANSFORMER}:
        raise ExportError(f"`{folder / MODULES_FILE}` has modules {', '.join(sorted(kinds))}; this task supports only {TRANSFORMER}.")
    if settings.default_prompt is not None and settings.prompts[settings.default_prompt]:
        raise ExportError(f"`{folder / SETTINGS_FILE}` has `default_prompt_name`, but only embeddings have prompts; remove it.")
