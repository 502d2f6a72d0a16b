"""Checks that the files of a run are different files, and that none is overwritten unasked. Knows no format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from bertserve.service.errors import SettingsError


def check_distinct(files: Mapping[str, Path]) -> None:
    """Checks that no two names stand for one file, by the same path or through links.

    Args:
        files: What a file is -> its path; it need not exist.

    Raises:
        SettingsError: Two are the same.
    """
    for (first, path), (second, other) in combinations(files.items(), 2):
        if os.path.realpath(path) == os.path.realpath(other) or _is_same_file(path, other):
            raise SettingsError(f"{second} is {first} (`{other}`); give another name.")


def check_stream(stream: IO[Any], files: Mapping[str, Path]) -> None:
    """Checks that a stream does not go to one of the files.

    Args:
        stream: Stdout.
        files: What a file is -> its path.

    Raises:
        SettingsError: It does.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # it is closed, or no file
        return
    for name, path in files.items():
        if path.is_file() and os.path.samestat(status, path.stat()):
            raise SettingsError(f"stdout is {name} (`{path}`); send it to another file.")


def refuse_existing(path: Path, *, flag: str) -> None:
    """Refuses a file that is there, for a run that was not told to replace it; a dangling link is there too.

    Args:
        path: Its path.
        flag: What gives another one.

    Raises:
        SettingsError: It is there.
    """
    if os.path.lexists(path):
        raise SettingsError(f"`{path}` exists already; give --restart to replace it, or choose another {flag}.")


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False
