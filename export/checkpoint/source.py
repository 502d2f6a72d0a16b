"""Finds a checkpoint's files in a local folder or on the hub, and has transformers read them: never a pickle, never code."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from bertserve.export.checkpoint.card_metadata import CardMetadata, read_card, read_card_metadata
from bertserve.export.checkpoint.lora import CONFIG_FILE, WEIGHTS_FILE, LoraAdapter, read_adapter
from bertserve.export.checkpoint.modules_json import find_transformer, read_modules
from bertserve.export.errors import CheckpointError

# no pickles, no Python: what is not fetched cannot be loaded
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "README.md")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class SourceFiles:
    """Folders of a checkpoint's files.

    Attributes:
        source: What the user gave.
        revision: Hub revision, if any.
        folder: Folder of the source.
        trained_folder: Folder of what was trained, model or adapter: `folder`, or the one in it that `modules.json` names.
        adapter: The adapter, if that was trained.
        model_folder: Folder of the model's configuration and weights: `trained_folder`, or that of the adapter's base model.
    """

    source: str
    revision: str | None
    folder: Path
    trained_folder: Path
    adapter: LoraAdapter | None
    model_folder: Path

    @property
    def is_local(self) -> bool:
        """Whether the source is a folder, and not a hub id."""
        return Path(self.source).is_dir()

    @property
    def commit(self) -> str | None:
        """The hub's commit, after which the folder of a download is named, or None for a local folder."""
        return self.folder.name if not self.is_local and _COMMIT.fullmatch(self.folder.name) else None

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer: an adapter may have its own."""
        has_own = self.adapter is None or (self.trained_folder / "tokenizer_config.json").is_file()
        return self.trained_folder if has_own else self.model_folder

    @property
    def card(self) -> str | None:
        """The checkpoint's README.md, if it has one."""
        return read_card(self.folder / "README.md", errors="replace")

    @property
    def card_metadata(self) -> CardMetadata:
        """What that file says of license, language and data."""
        return read_card_metadata(self.folder / "README.md")

    @property
    def weights_sha256(self) -> str:
        """Digest over the weight files that are loaded: the model's, after an adapter's."""
        hasher = hashlib.sha256()
        adapter = [] if self.adapter is None else [self.trained_folder / WEIGHTS_FILE]
        for path in (*adapter, *_weight_files(self.source, self.model_folder)):
            with path.open("rb") as file:
                hasher.update(hashlib.file_digest(file, "sha256").digest())
        return hasher.hexdigest()


def find_source(source: str, revision: str | None) -> SourceFiles:
    """Finds a checkpoint, downloading what is not here.

    Args:
        source: A local folder or a hub id.
        revision: Branch, tag or commit of a hub id.

    Raises:
        CheckpointError: It does not exist, or its weights are not safetensors.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    folder = _find_folder(source, revision)
    trained_folder = find_transformer(folder)
    adapter = read_adapter(trained_folder)
    model_folder = trained_folder if adapter is None else _find_base_model(adapter)
    _weight_files(source, model_folder)
    return SourceFiles(source, revision, folder, trained_folder, adapter, model_folder)


def read_with_transformers(what: str, from_pretrained: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """Calls a `from_pretrained`, translating what transformers raises for broken files.

    Args:
        what: What is read, for the message.
        from_pretrained: The function.
        folder: Folder of the files.
        options: Its further arguments.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # transformers checks few fields, so its parsing raises anything, and what it raises has no common base
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{what} needs custom code of the checkpoint's own (`auto_map`), which is never run; only architectures that "
                f"transformers {transformers.__version__} has itself can be exported."
            ) from error
        hint = ""
        if "weights" in what:
            hint = (
                "; the file is damaged or not the real one, so fetch it again."
                if any(folder.glob("*.safetensors"))
                else " Pickled weights are never loaded: save them with `save_pretrained` as safetensors."
            )
        raise CheckpointError(f"{what} cannot be read: {reason}{hint}") from error


def _find_folder(source: str, revision: str | None) -> Path:
    """Returns the local folder of a source, downloading a hub id's small set of files first."""
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(f"the folder `{source}` does not exist.")
    try:
        return _download(source, revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(_why_not_downloaded(source, error)) from error


def _why_not_downloaded(source: str, error: Exception) -> str:
    """Returns what is wrong, and what to do."""
    causes = (error, error.__cause__)  # of a repository of which nothing is in the cache, huggingface_hub may raise another error
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"`{source}` is a gated repository; accept its conditions on its page, and give a token of that account in HF_TOKEN or by "
            "`hf auth login`."
        )
    hint = ""
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        hint = " A private repository needs a token, in HF_TOKEN or by `hf auth login`."
    return f"`{source}` is not a local folder, and the hub did not give it ({type(error).__name__}); check the id, --revision and the network.{hint}"


def _download(source: str, revision: str | None) -> Path:
    """Downloads the files of a hub id's top folder, and of the folders that its `modules.json` names; returns the top folder.

    The hub's `*` matches `/` too. Without a limit it would fetch the weights of every step that a Trainer pushed (`checkpoint-500/`), and
    those of other formats (`onnx/`, `original/`).
    """
    folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision  # a branch may move between two downloads
    for path in sorted({entry.folder.relative_to(folder).as_posix() for entry in read_modules(folder)} - {"."}):
        escaped = glob.escape(path)
        allowed = [f"{escaped}/{pattern}" for pattern in _WANTED]
        snapshot_download(source, revision=commit, allow_patterns=allowed, ignore_patterns=[f"{escaped}/*/*"])
    return folder


def _find_base_model(adapter: LoraAdapter) -> Path:
    """Returns the folder of the model that an adapter was trained on.

    Raises:
        CheckpointError: It does not exist, or has an adapter too, which transformers would load where peft is installed.
    """
    folder = find_transformer(_find_folder(adapter.base_model, adapter.base_revision))
    if (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"the adapter `{adapter.folder.name}` was trained on `{adapter.base_model}`, which has an adapter of its own; merge both with peft "
            "and export the result."
        )
    return folder


def _weight_files(source: str, folder: Path) -> list[Path]:
    """Returns the files that transformers loads a model's weights from: one, or the parts that an index names; none where it has neither.

    Raises:
        CheckpointError: The index names other files than safetensors, which transformers would unpickle.
    """
    whole, path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not path.is_file():
        return [whole] if whole.is_file() else []
    try:
        parts = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the weights of `{source}` cannot be read: `{path.name}` is not an index of weights.") from error
    wrong = sorted(str(part) for part in parts if not str(part).endswith(".safetensors") or Path(str(part)).name != part)
    if wrong:
        raise CheckpointError(
            f"the weights of `{source}` cannot be read: `{path.name}` names `{wrong[0]}`, which is not a safetensors file of its folder. "
            "Pickled weights are never loaded: save them with `save_pretrained` as safetensors."
        )
    return [whole] if whole.is_file() else [folder / str(part) for part in sorted(parts)]
