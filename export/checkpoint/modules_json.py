"""Reads `modules.json` of a sentence-transformers checkpoint: the modules that a text passes, and the folder of each one's files.

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]

The Transformer's path is empty if the model lies beside `modules.json`. Older checkpoints have it in a folder of its own,
`0_Transformer`, with tokenizer and `sentence_bert_config.json`; a `config.json` beside `modules.json` is then not the model's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bertserve.export.errors import CheckpointError

MODULES_FILE = "modules.json"
TRANSFORMER, POOLING = "Transformer", "Pooling"


@dataclass(frozen=True)
class ModuleEntry:
    """One entry of `modules.json`.

    Attributes:
        kind: Last part of its type: `Transformer`, `Pooling`, `Normalize` or another.
        folder: Folder of its files, if it has any.
    """

    kind: str
    folder: Path


def read_modules(folder: Path) -> tuple[ModuleEntry, ...]:
    """Reads the modules of a checkpoint; without a `modules.json` there are none.

    Raises:
        CheckpointError: `modules.json` is broken, or names a folder outside of the checkpoint.
    """
    entries = read_json(folder / MODULES_FILE, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"`{folder / MODULES_FILE}` is no list of steps; fetch it again.")
    return tuple(_entry(folder, str(entry.get("type", "")), str(entry.get("path", ""))) for entry in entries)


def has_pooling(folder: Path) -> bool:
    """Returns whether a checkpoint makes one vector of a text's tokens, so that it is for embeddings whatever its configuration says.

    Raises:
        CheckpointError: `modules.json` is broken, or names a folder outside of the checkpoint.
    """
    return any(entry.kind == POOLING for entry in read_modules(folder))


def find_transformer(folder: Path) -> Path:
    """Returns the folder of a checkpoint's model: its own folder, or the one that `modules.json` names.

    Raises:
        CheckpointError: `modules.json` is broken, names several, or a folder that does not exist.
    """
    folders = [entry.folder for entry in read_modules(folder) if entry.kind == TRANSFORMER] or [folder]
    if len(folders) > 1:
        names = ", ".join(f"`{path.name}`" for path in folders)
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has {len(folders)} Transformer steps ({names}); only checkpoints of one are understood."
        )
    if not folders[0].is_dir():
        raise CheckpointError(f"the folder `{folders[0]}` is missing, which {MODULES_FILE} names; copy the checkpoint whole.")
    return folders[0]


def read_json(path: Path, default: Any) -> Any:
    """Returns a JSON file's content, or `default` if there is no such file.

    Raises:
        CheckpointError: It is no JSON, or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}.") from error


def _entry(folder: Path, kind: str, path: str) -> ModuleEntry:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(f"`{folder / MODULES_FILE}` names `{path}`, which is outside of the checkpoint; name a folder within it.")
    return ModuleEntry(kind.rpartition(".")[2], folder / parts)
