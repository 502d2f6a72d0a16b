"""The folder that the workers of one service share, for metrics and changes of models: in memory where that is possible. Knows no content.

A lock tells whether the service still runs: the kernel releases it when the last of its processes ends, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertserve.service.errors import StartError

PREFIX = "bertserve-"
MEMORY = "/dev/shm"  # noqa: S108 - the folder in it is made by tempfile, for this user alone


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Makes a folder, holds its lock, and removes it at the end; processes that are forked meanwhile hold the lock too.

    Raises:
        StartError: No folder can be made.
    """
    # a container's file system may be read-only
    parent = MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()
    remove_abandoned(Path(parent))
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise StartError(f"--workers needs a folder for metrics, and none can be made ({error.strerror}); set TMPDIR to one.") from error
    with folder as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks; nobody else can take this one either
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user's services that were killed, supervisor and workers: they would keep their memory."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile, or in use
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # one without content may be a moment old, and not locked yet
                if os.fstat(descriptor).st_uid == os.getuid() and os.listdir(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
