"""Finds a checkpoint's files in a local folder or on the hub, and reads them with transformers, but never its code."""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from bertserve.export.checkpoint.card import read_card_metadata
from bertserve.export.checkpoint.lora import ADAPTER_WEIGHTS_FILE, PICKLED_ADAPTER, LoraAdapter, read_adapter
from bertserve.export.checkpoint.sentence_transformers import DENSE, find_transformer, read_modules
from bertserve.export.checkpoint.weight_files import SAFETENSORS, find_weights
from bertserve.export.errors import ExportError, first_line
from bertserve.service.bundle.checkpoint_files import ADAPTER_CONFIG_FILE, FILE_PATTERNS, is_checkpoint, may_be_hub_id
from bertserve.service.bundle.files import is_bundle
from bertserve.service.bundle.manifest import Source, TokenTypes

# downloaded only for a folder that has no safetensors: files that are not downloaded cannot be loaded
_PICKLE_PATTERNS = ("pytorch_model*.bin", PICKLED_ADAPTER)
_SAFETENSORS_FILES = (SAFETENSORS, f"{SAFETENSORS}.index.json", ADAPTER_WEIGHTS_FILE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class SourceFiles:
    """Folders of a checkpoint's files.

    Attributes:
        source: The source as given by the user.
        trained_folder: Folder of the trained model or adapter: `folder`, or the subfolder that `modules.json` names.
        model_folder: Folder of the model's configuration and weights: `trained_folder`, or the folder of the adapter's base model.
    """

    source: str
    revision: str | None
    folder: Path
    trained_folder: Path
    adapter: LoraAdapter | None
    model_folder: Path

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer: an adapter can have its own."""
        return self.trained_folder if (self.trained_folder / "tokenizer_config.json").is_file() else self.model_folder

    @cached_property
    def weights(self) -> list[Path]:
        """The model's weight files: all are safetensors, or all are pickles."""
        return find_weights(self.source, self.model_folder)

    def origin(self, card: Path | None, ignored_weights: Sequence[str], token_types: TokenTypes | None) -> Source:
        """Returns the manifest's entry for the checkpoint, without the versions of packages."""
        dense = [path for kind, folder in read_modules(self.folder) if kind == DENSE for path in find_weights(self.source, folder)]
        paths = [*([] if self.adapter is None else [self.adapter.weights]), *self.weights, *dense]
        hasher = hashlib.sha256()
        for path in paths:
            with path.open("rb") as file:
                hasher.update(hashlib.file_digest(file, "sha256").digest())
        is_local = Path(self.source).is_dir()
        return Source(
            checkpoint=Path(os.path.abspath(self.source)).name if is_local else self.source,
            revision=self.revision,
            weights_sha256=hasher.hexdigest(),
            versions={},
            commit=self.folder.name if not is_local and _COMMIT.fullmatch(self.folder.name) else None,
            ignored_weights=tuple(ignored_weights),
            weights_format="pickle" if any(path.suffix == ".bin" for path in paths) else "safetensors",
            token_types=token_types,
            **read_card_metadata(card),
        )


def find_source(source: str, revision: str | None) -> SourceFiles:
    """Finds a checkpoint by its local folder, or by its hub id and a branch, tag or commit; downloads missing files."""
    if revision is not None and Path(source).is_dir():
        raise ExportError(f"--revision {revision} is for a hub id, but `{source}` is a folder; remove it.")
    folder = _find_folder(source, revision)
    trained_folder = find_transformer(folder)
    adapter, model_folder = read_adapter(trained_folder), trained_folder
    if adapter is not None:
        model_folder = find_transformer(_find_folder(adapter.base_model, adapter.base_revision))
        if (model_folder / ADAPTER_CONFIG_FILE).is_file():
            raise ExportError(f"the adapter `{folder.name}` is for `{adapter.base_model}`, an adapter; merge both with peft first.")
    return SourceFiles(source, revision, folder, trained_folder, adapter, model_folder)


def read_with_transformers(description: str, from_pretrained: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """Calls a `from_pretrained` function with the options, and translates its errors about broken files, called `description` there."""
    try:
        return from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # transformers validates few fields, so its parsing can raise any error
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise ExportError(
                f"{description} needs custom code of the checkpoint (`auto_map`), which is never run; only architectures "
                f"of transformers {transformers.__version__} can be exported."
            ) from error
        hint = "; the file is damaged or a placeholder, so download it again." if "weights" in description else ""
        raise ExportError(f"{description} cannot be read: {reason}{hint}") from error


def _find_folder(source: str, revision: str | None) -> Path:
    """Returns the local folder of a source; for a hub id it first downloads the few files that are needed."""
    if is_bundle(Path(source)) and not is_checkpoint(Path(source)):
        raise ExportError(f"`{source}` is a bundle, not a checkpoint; serve it with `bert-serve serve --model {source}`.")
    if Path(source).is_dir():
        return Path(source)
    if not may_be_hub_id(source):
        raise ExportError(f"the folder `{source}` does not exist.")
    try:
        return _download(source, revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        # for a repository without files in the cache, huggingface_hub raises another error from the actual one
        raise ExportError(
            f"`{source}` is not a local folder, and cannot be downloaded from the hub ({type(error.__cause__ or error).__name__}); check "
            "the id, --revision and the network, and for a private or gated repository HF_TOKEN or `hf auth login`."
        ) from error


def _download(source: str, revision: str | None) -> Path:
    """Downloads the files in a hub id's top folder, and in the subfolders that its `modules.json` names; returns the top folder.

    The hub's `*` also matches `/`. Without the limit it would download the weights of every step that a Trainer pushed (`checkpoint-500/`),
    and files of other formats (`onnx/`, `original/`).
    """
    folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(FILE_PATTERNS), ignore_patterns=["*/*"]))
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision  # a branch can move between two downloads

    def fetch(path: str, patterns: Sequence[str]) -> None:
        start = "" if path == "." else f"{glob.escape(path)}/"
        allowed = [start + pattern for pattern in patterns]
        snapshot_download(source, revision=commit, allow_patterns=allowed, ignore_patterns=[f"{start}*/*"])

    subfolders = sorted({path.relative_to(folder).as_posix() for _, path in read_modules(folder)} - {"."})
    for path in subfolders:
        fetch(path, FILE_PATTERNS)
    for path in (".", *subfolders):
        if not any((folder / path / name).is_file() for name in _SAFETENSORS_FILES):
            fetch(path, _PICKLE_PATTERNS)
    return folder
