"""The hidden folder that an export works in, beside its output.

A killed export cannot remove its folder. Each export therefore holds a lock while it works, which ends with the process, and the next
export of that name removes the folders that nobody has locked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from export.signals import ignore_signals

LOCK_FILE = "export.lock"


@contextmanager
def workspace(name: str, output: Path) -> Iterator[Path]:
    """Makes a hidden folder on the output's file system and removes it at the end; removes those of killed exports first.

    Args:
        name: Name of the bundle.
        output: The models folder.
    """
    with ignore_signals():
        _remove_abandoned(name, output)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=output))
    try:
        with (scratch / LOCK_FILE).open("w", encoding="ascii") as lock:
            with suppress(OSError):  # on a file system without locks nobody can lock the folder later either, so it is never removed
                fcntl.flock(lock, fcntl.LOCK_EX)
                # the process id says that the lock was taken: the folder of an export that is just beginning must not be removed
                print(os.getpid(), file=lock, flush=True)
            yield scratch
    finally:
        with ignore_signals():
            _remove(scratch)


def _remove_abandoned(name: str, output: Path) -> None:
    """Removes the folders of killed exports of this name."""
    for folder in output.iterdir():
        if re.fullmatch(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}", folder.name):  # as tempfile names them
            with suppress(OSError), (folder / LOCK_FILE).open("r+", encoding="ascii") as lock:  # no lock file, or a locked one
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read():
                    _remove(folder)


def _remove(scratch: Path) -> None:
    """Removes a folder, its lock last: if this is killed too, the next export continues."""
    for path in scratch.glob("*/"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
