"""A source of a model, as `--model` names it: a bundle, a folder of a checkpoint, or a hub id; with the digest that its export is kept by.

It reads files for their digest alone: what a checkpoint is, is for bert-export to say.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertserve.service import __version__
from bertserve.service.bundle.files import MANIFEST_FILE, digest, is_checkpoint
from bertserve.service.bundle.manifest import NAME_PATTERN
from bertserve.service.errors import SettingsError, StartError

# what bert-export reads of a checkpoint; its card too, which the bundle's card quotes
_READ = ("*.json", "*.safetensors", "*.txt", "*.model", "README.md")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        name: What it is served as.
        where: A folder, or a hub id.
        revision: Branch, tag or commit of a hub id.
    """

    name: str
    where: str
    revision: str | None = None

    @property
    def is_bundle(self) -> bool:
        """Whether it can be served as it is."""
        return (Path(self.where) / MANIFEST_FILE).is_file()

    def key(self, options: Sequence[str]) -> str:
        """Returns what names its export: a digest of its files, or of the hub id with the revision, and of the options.

        Args:
            options: The flags of the export.

        Raises:
            StartError: A file cannot be read.
        """
        facts: list[object] = [__version__, self.name, list(options)]
        if not Path(self.where).is_dir():
            return _digest([*facts, self.where, self.revision])
        try:
            return _digest([*facts, [(str(path.name), digest(path)) for folder in _folders(Path(self.where)) for path in _files(folder)]])
        except OSError as error:
            raise StartError(f"the checkpoint `{self.where}` cannot be read: `{error.filename}`, {error.strerror}.") from error


def read_source(text: str) -> Source:
    """Reads `SOURCE`, `NAME=SOURCE` or, of a hub id, `ID@REVISION`.

    Raises:
        SettingsError: There is no such folder, or the name cannot be a model's.
        StartError: The folder is neither a checkpoint nor a bundle.
    """
    name, equals, where = text.partition("=")
    if not equals or Path(text).exists():
        name, where = "", text
    where = os.path.expanduser(where) if where.startswith("~") else where
    if Path(where).exists():
        return _of_folder(text, name, Path(where))
    if where.count("/") > 1 or where.startswith((".", "/", "~")) or not where.strip("/"):
        raise SettingsError(f"--model is `{text}`: the folder `{where}` does not exist.")
    hub_id, _, revision = where.partition("@")
    return Source(_checked(name or hub_id.rpartition("/")[2], text), hub_id, revision or None)


def _of_folder(text: str, name: str, folder: Path) -> Source:
    own_name = Path(os.path.abspath(folder)).name
    if (folder / MANIFEST_FILE).is_file():
        if name not in ("", own_name):
            raise SettingsError(
                f"--model is `{text}`: a bundle is served by its own name, `{own_name}`; export its checkpoint with another --name."
            )
    elif not is_checkpoint(folder):
        inside = [path.parent.name for path in folder.glob(f"*/{MANIFEST_FILE}")] if folder.is_dir() else []
        if inside:
            raise StartError(f"`{folder}` is a folder of bundles ({', '.join(sorted(inside)[:4])}); give it with --models {folder}.")
        steps = sorted(str(path) for path in folder.iterdir() if is_checkpoint(path)) if folder.is_dir() else []
        if steps:
            raise StartError(f"`{folder}` is a folder of checkpoints; give one of them, such as --model {steps[-1]}.")
        raise StartError(f"`{folder}` is neither a checkpoint, which has a `config.json`, nor a bundle, which has a `{MANIFEST_FILE}`.")
    return Source(_checked(name or own_name, text), str(folder))


def _checked(name: str, text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingsError(f"--model is `{text}`: `{name}` cannot be a model's name, which must match {NAME_PATTERN}; give NAME=SOURCE.")
    return name


def _folders(folder: Path) -> Iterator[Path]:
    """Yields the folders of a checkpoint, and those of the model which an adapter in one of them was trained on."""
    for own in _with_modules(folder):
        yield own
        adapter = _document(own / "adapter_config.json")
        model = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        if isinstance(model, str) and model and Path(model).is_dir():
            yield from _with_modules(Path(model))


def _with_modules(folder: Path) -> Iterator[Path]:
    """Yields a folder, and those in it that its modules.json names; others, as of a training's steps, are no part of the checkpoint."""
    yield folder
    modules = _document(folder / "modules.json")
    for module in modules if isinstance(modules, list) else []:
        if isinstance(module, dict) and isinstance(path := module.get("path"), str) and path and (folder / path).is_dir():
            yield folder / path


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _READ for path in folder.glob(pattern) if path.is_file()})


def _document(path: Path) -> object:
    """Returns a JSON document; one that is missing or broken, which bert-export will say, is None."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _digest(facts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
