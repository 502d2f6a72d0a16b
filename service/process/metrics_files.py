"""The files in which a worker keeps its metrics: their room is taken at the start. Knows what prometheus_client calls them, and no metric.

Files belong to a worker's index, not to its process: a worker that takes the place of another counts on in its files, so that their number
does not grow. prometheus_client maps files that have length but no room yet. On a full disk the first touch of a page would end the process
(SIGBUS).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("bertserve.metrics")

# bytes by kind of metric: some 45 models and tasks of them, beyond which prometheus_client doubles a file itself
SIZES = {"histogram": 2**20, "counter": 2**18, "gauge_livesum": 2**16, "gauge_livemax": 2**16}


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
