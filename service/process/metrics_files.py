"""The folder that all workers share, and the files in it in which each worker keeps its metrics. Knows no metric.

A folder that is abandoned after SIGKILL is removed by the next start: a folder in use has a lock, which the kernel releases when the last of
its processes ends.

The room of a file is taken at the start. Files belong to a worker's index, not to its process: a worker that takes the place of another counts on in its files, so that their number
does not grow. prometheus_client maps files that have length but no room yet. On a full disk the first touch of a page would end the process
(SIGBUS).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertserve.service.errors import StartError

logger = logging.getLogger("bertserve.metrics")

# bytes by kind of metric: some 45 models and tasks of them, beyond which prometheus_client doubles a file itself
SIZES = {"histogram": 2**20, "counter": 2**18, "gauge_livesum": 2**16, "gauge_livemax": 2**16}

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


def reserve(folder: Path, index: int) -> None:
    """Makes the files of a worker, before prometheus_client is imported, or takes those of the worker that it replaces.

    Without room for them it counts in its memory, for itself.

    Args:
        folder: Of all workers' files, which PROMETHEUS_MULTIPROC_DIR names.
        index: Of the worker.
    """
    made: list[Path] = []
    try:
        for kind, size in SIZES.items():
            path = _path(folder, kind, index)
            target = path
            if not path.exists():
                target = path.with_suffix(".new")  # other workers read every file of the folder, and this one is empty for a moment
                made += [target, path]
            with target.open("ab") as file:
                # a file that prometheus_client has made longer may have length without room, too
                os.posix_fallocate(file.fileno(), 0, max(size, os.fstat(file.fileno()).st_size))
            target.rename(path)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        logger.error(
            "cannot write this worker's metrics (%s): they are missing from /metrics; it needs %d bytes.",
            error.strerror,
            sum(SIZES.values()),
        )


def forget(folder: Path, index: int) -> None:
    """Drops the gauges of a worker that has ended; what it counted stays. The supervisor, whose copy a new worker is, imports no metrics."""
    for kind in SIZES:
        if kind.startswith("gauge_live"):
            _path(folder, kind, index).unlink(missing_ok=True)


def _path(folder: Path, kind: str, index: int) -> Path:
    """Returns the file's path, as prometheus_client makes it of a process identifier."""
    return folder / f"{kind}_{index}.db"
