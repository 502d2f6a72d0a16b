"""ChangeLog: which changes of models were asked for, and how far each worker has followed. Files in a folder that all share; knows no model.

Each change is a file whose name is its number, and each worker has a file about itself. Both come whole or not at all, by a rename or
a link, so that nobody waits for a lock that a dead process holds.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOST_OUTCOMES = 64


@dataclass(frozen=True, slots=True)
class Change:
    """A change that all workers are to make.

    Attributes:
        what: `load`, `unload`, or `refresh`: make it what the folders have.
        name: The model's; empty for `refresh`.
    """

    what: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a change in a worker.

    Attributes:
        version: Of the model that it loaded.
        error: Why it did not.
        missing: Whether there was no such model.
    """

    version: str | None = None
    error: str | None = None
    missing: bool = False


@dataclass(slots=True)
class Progress:
    """How far a worker has followed.

    Attributes:
        done: Number of the last change that it made, or could not make.
        trying: Number of the one that it makes now, if that is greater.
        served: Name -> version of its models.
        broken: Name -> why it could not be loaded.
        defaults: Task -> name of the model that its endpoint uses.
        outcomes: Number -> what became of the change, of the last few.
    """

    done: int = 0
    trying: int = 0
    served: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class ChangeLog:
    """The changes, in the order that all workers make them in."""

    def __init__(self, folder: Path) -> None:
        """Creates a log, or finds the one that is there.

        Args:
            folder: For nothing else; shared by all workers.
        """
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def append(self, change: Change) -> int:
        """Adds a change and returns its number, from 1 on."""
        new = self._written(f".change-{os.getpid()}", asdict(change))
        number = 1
        while True:
            try:
                os.link(new, self._folder / f"change-{number}.json")
            except FileExistsError:
                number += 1
            else:
                new.unlink()
                return number

    def read(self, number: int) -> Change | None:
        """Returns a change, or None if there is none of that number yet."""
        read = self._read(f"change-{number}.json")
        return None if read is None else Change(**read)

    def publish(self, index: int, progress: Progress) -> None:
        """Says how far a worker is."""
        progress.outcomes = dict(list(progress.outcomes.items())[-MOST_OUTCOMES:])
        self._written(f".worker-{index}", asdict(progress)).rename(self._folder / f"worker-{index}.json")

    def progress(self, index: int) -> Progress | None:
        """Returns how far a worker is, or the one was whose place it takes; None if there was none."""
        read = self._read(f"worker-{index}.json")
        if read is None:
            return None
        return Progress(**read | {"outcomes": {int(number): Outcome(**each) for number, each in read["outcomes"].items()}})

    def _written(self, name: str, value: dict[str, Any]) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(value), encoding="utf-8")
        return path

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            read: dict[str, Any] = json.loads((self._folder / name).read_bytes())
        except FileNotFoundError:
            return None
        return read
