"""The engine of the limit, with the bodies of a load made ready for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine.bare_engine import VERSION, BareEngine
from bench.engine.limit import Limit
from bench.engine.workload import Work
from bench.progress import Progress
from bench.workload.bodies import Body
from service.bundle import files


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of the limit, with the bodies of the load made ready for it."""

    bare: BareEngine
    work: Work
    threads: int
    stop: threading.Event
    progress: Progress

    def limit(self, seconds: float) -> Limit:
        """Runs the bare loop."""
        self.progress.begin(f"engine alone on {self.threads} threads, {seconds:g} s")
        return self.bare.measure(self.work, threads=self.threads, seconds=seconds, stop=self.stop)

    def facts(self) -> dict[str, Any]:
        """Returns what a report says of it."""
        loaded = self.bare.bundle
        spec = loaded.graph("cpu")
        own = self.bare.graph == loaded.path / spec.file
        return {
            "bundle": loaded.manifest.name,
            "digest": loaded.version,
            "graph": self.bare.graph.name,
            "graph_sha256": spec.identity if own else files.digest(self.bare.graph),
            "onnxruntime": VERSION,
            "precision": spec.precision if own else None,
            "threads": self.threads,
        }


def make_engine(
    path: Path, graph: Path | None, given: Sequence[Body], *, threads: int, stop: threading.Event, progress: Progress
) -> Engine:
    """Loads a bundle for the limit.

    Args:
        path: The bundle's folder.
        graph: Another graph to run, or None.
        given: Bodies to run.
        threads: Of the bare loop.
        stop: Set by Ctrl-C.
        progress: Told of the loops.

    Raises:
        BenchError: The bundle or the graph cannot be used, or does not take these bodies.
    """
    bare = BareEngine(path, graph)
    return Engine(bare, bare.work(given), threads, stop, progress)
