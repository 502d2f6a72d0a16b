"""The steps of a sentence-transformers checkpoint, from its `modules.json`: what each does, and in which folder its files lie.

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]

The Transformer's path is empty where the model lies beside `modules.json`. Older checkpoints have it in a folder of its own,
`0_Transformer`, with tokenizer and `sentence_bert_config.json`; a `config.json` beside `modules.json` is then not the model's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from export.errors import CheckpointError

MODULES_FILE = "modules.json"
TRANSFORMER = "Transformer"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kind: Last part of its type: `Transformer`, `Pooling`, `Normalize` or another.
        folder: Where its files lie, if it has any.
    """

    kind: str
    folder: Path


def read(folder: Path) -> tuple[Step, ...]:
    """Reads the steps of a checkpoint; one that is none of sentence-transformers' has none.

    Raises:
        CheckpointError: `modules.json` is broken, or names a folder outside of the checkpoint.
    """
    listed = document(folder / MODULES_FILE, [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise CheckpointError(f"`{folder / MODULES_FILE}` is no list of steps; fetch it again.")
    return tuple(_step(folder, str(entry.get("type", "")), str(entry.get("path", ""))) for entry in listed)


def transformer(folder: Path) -> Path:
    """Returns where the model of a checkpoint lies: its own folder, or the one that `modules.json` names.

    Raises:
        CheckpointError: `modules.json` is broken, names several, or a folder that is not there.
    """
    found = [step.folder for step in read(folder) if step.kind == TRANSFORMER] or [folder]
    if len(found) > 1:
        names = ", ".join(f"`{path.name}`" for path in found)
        raise CheckpointError(
            f"`{folder / MODULES_FILE}` has {len(found)} Transformer steps ({names}); only checkpoints of one are understood."
        )
    if not found[0].is_dir():
        raise CheckpointError(f"the folder `{found[0]}` is missing, which {MODULES_FILE} names; copy the checkpoint whole.")
    return found[0]


def document(path: Path, missing: Any) -> Any:
    """Returns a JSON file's content, or `missing` where there is no such file.

    Raises:
        CheckpointError: It is no JSON, or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else missing
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}.") from error


def _step(folder: Path, kind: str, path: str) -> Step:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(f"`{folder / MODULES_FILE}` names `{path}`, which is outside of the checkpoint; name a folder within it.")
    return Step(kind.rpartition(".")[2], folder / parts)
