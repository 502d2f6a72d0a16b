"""The engine benchmark of a command: a bundle loaded, with the bodies of the load encoded for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.bench.engine.bare_engine import VERSION, BareEngine
from bertserve.bench.engine.limit import EncodedBodies, EngineLimit
from bertserve.bench.progress import Progress
from bertserve.bench.workload.bodies import Body
from bertserve.service.bundle import files


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """A bare engine and what it runs.

    Attributes:
        engine: The engine.
        encoded: The bodies of the load, as inputs of the graph.
        threads: Number of threads of the bare loop.
        stop: Set by Ctrl-C; ends a loop early.
        progress: Gets a line for each loop.
    """

    engine: BareEngine
    encoded: EncodedBodies
    threads: int
    stop: threading.Event
    progress: Progress

    def measure_limit(self, seconds: float) -> EngineLimit:
        """Runs the bare loop for this many seconds."""
        self.progress.start(f"engine alone on {self.threads} threads, {seconds:g} s")
        return self.engine.run_loop(self.encoded, threads=self.threads, seconds=seconds, stop=self.stop)

    def describe(self) -> dict[str, Any]:
        """Returns the entry of a report: bundle, graph, precision, version of onnxruntime, threads."""
        bundle = self.engine.bundle
        spec = bundle.graph("cpu")
        own = self.engine.graph == bundle.path / spec.file
        return {
            "bundle": bundle.manifest.name,
            "digest": bundle.version,
            "graph": self.engine.graph.name,
            "graph_sha256": spec.identity if own else files.digest(self.engine.graph),
            "onnxruntime": VERSION,
            "precision": spec.precision if own else None,
            "threads": self.threads,
        }


def load_benchmark(
    path: Path, graph: Path | None, bodies: Sequence[Body], *, threads: int, stop: threading.Event, progress: Progress
) -> EngineBenchmark:
    """Loads a bundle and encodes bodies for it.

    Args:
        path: Folder of the bundle.
        graph: ONNX file to run in place of the bundle's graph, or None.
        bodies: Bodies to run.
        threads: Number of threads of the bare loop.
        stop: Set by Ctrl-C; ends a loop early.
        progress: Gets a line for each loop.

    Raises:
        BenchError: The bundle or the graph cannot be used, or does not take these bodies.
    """
    engine = BareEngine(path, graph)
    return EngineBenchmark(engine, engine.encode(bodies), threads, stop, progress)
