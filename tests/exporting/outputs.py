"""What an export is asked for, and what it leaves in the models folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FAST = ("--precision", "fp32")
Run = Callable[..., tuple[int, str]]


def left_in(output: Path) -> list[str]:
    """Returns the names of everything in the output folder, hidden things too."""
    return sorted(path.name for path in output.iterdir()) if output.exists() else []


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
