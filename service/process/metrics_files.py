"""The files in which a worker keeps its metrics: their room is taken at the start. Knows what prometheus_client calls them, and no metric.

prometheus_client maps files that have length but no room yet. On a full disk the first touch of a page would end the process (SIGBUS).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("bertserve.metrics")

# bytes by kind of metric: some 45 models and tasks of them, beyond which prometheus_client doubles a file itself
SIZES = {"histogram": 2**20, "counter": 2**18, "gauge_livesum": 2**16, "gauge_livemax": 2**16}


def reserve(folder: Path) -> None:
    """Makes this process' files, before prometheus_client is imported. Without room for them it counts in its memory, for itself.

    Args:
        folder: Of all workers' files, which PROMETHEUS_MULTIPROC_DIR names.
    """
    paths = {kind: folder / f"{kind}_{os.getpid()}.db" for kind in SIZES}
    try:
        for kind, path in paths.items():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, SIZES[kind])
    except OSError as error:
        for path in paths.values():
            path.unlink(missing_ok=True)
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        logger.error(
            "no room for the metrics of this worker (%s): /metrics has them not; give it %d bytes", error.strerror, sum(SIZES.values())
        )


def forget(folder: Path, pid: int) -> None:
    """Drops the gauges of a process that has ended; what it counted stays. The supervisor, whose copy a new worker is, imports no metrics."""
    for kind in SIZES:
        if kind.startswith("gauge_live"):
            (folder / f"{kind}_{pid}.db").unlink(missing_ok=True)
