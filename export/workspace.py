"""The hidden folder that an export works in, beside its output.

An export that is killed cannot remove it. Each therefore holds a lock while it works, which ends with the process, and the next
one of that name removes the folders that nobody holds.
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

from export.signals import held_off

LOCK_FILE = "export.lock"


@contextmanager
def workspace(name: str, output: Path) -> Iterator[Path]:
    """Makes a hidden folder on the output's file system, and removes it whatever happens, with those of killed exports.

    Args:
        name: Name of the bundle that is made.
        output: The models folder.
    """
    with held_off():
        _clear(name, output)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=output))
    try:
        with (scratch / LOCK_FILE).open("w", encoding="ascii") as lock:
            with suppress(OSError):  # a file system without locks: then nobody can take one either, and the folder is never cleared
                fcntl.flock(lock, fcntl.LOCK_EX)
                # what is written says that the lock was taken: a folder of an export that is just beginning is not to be cleared
                print(os.getpid(), file=lock, flush=True)
            yield scratch
    finally:
        with held_off():
            _remove(scratch)


def _clear(name: str, output: Path) -> None:
    """Removes the folders of exports of this name that have ended without doing so."""
    for folder in output.iterdir():
        if re.fullmatch(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}", folder.name):  # as tempfile names them
            with suppress(OSError), (folder / LOCK_FILE).open("r+", encoding="ascii") as lock:  # none, or one that is held
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read():
                    _remove(folder)


def _remove(scratch: Path) -> None:
    """Removes a folder, its lock last: if this is killed too, the next export goes on with it."""
    for path in scratch.glob("*/"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
