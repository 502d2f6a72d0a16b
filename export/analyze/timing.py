"""Runs a graph at several lengths in a separate process without torch, so that memory and time are those of the graph.

As a program it reads a job as JSON and writes its measurements. It uses one thread per run, like an inference thread of the service.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.export.errors import GraphError
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.errors import BertServeError
from bertserve.service.text.tokenizer import Encoding

RUNS = (3, 30)  # minimum and maximum number for each batch
PATIENCE = 4  # multiple of its time after which a slow batch may have fewer runs than the minimum
_MIB = 2**20


@dataclass(frozen=True)
class AnalysisTiming:
    """The times of texts with the same length.

    Attributes:
        length: Tokens of each text.
        latency_ms: Median time of a single text.
        latency_p90_ms: 90th percentile of this time.
        latency_cpu_ms: Median CPU time of a single text. On one thread it equals the latency if no other work uses the core.
        runs: Number of runs with a single text.
        batch: Number of texts of a batch.
        texts_per_s: Throughput in batches, from the median time of a batch.
        cpu_ms: CPU time per text in batches, an indicator of energy on any machine.
        memory_mib: Memory that the graph and its runs up to this length added to the process, if the system reports it.
    """

    length: int
    latency_ms: float
    latency_p90_ms: float
    latency_cpu_ms: float
    runs: int
    batch: int
    texts_per_s: float
    cpu_ms: float
    memory_mib: float | None


def measure_apart(path: Path, graph: GraphSpec, pad_id: int, lengths: Sequence[int], *, batch: int, seconds: float) -> list[AnalysisTiming]:
    """Measures a graph at lengths in tokens in a separate process; `seconds` limits the runs of each length after the minimum number.

    Raises:
        GraphError: The process ended without a result.
    """
    job = {"path": str(path), "graph": graph.model_dump(mode="json"), "pad_id": pad_id}
    job |= {"lengths": sorted(lengths), "batch": batch, "seconds": seconds}
    # imports the same modules as this process, from wherever they were found
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    process = subprocess.run([sys.executable, "-P", "-c", program], input=json.dumps(job), capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise GraphError(f"the {graph.precision} graph could not be measured: {last}")
    return [AnalysisTiming(**timing) for timing in json.loads(process.stdout)]


def main() -> None:
    """Reads a job from stdin, and writes its timings to stdout."""
    json.dump([asdict(timing) for timing in measure(json.load(sys.stdin))], sys.stdout)


def measure(job: Mapping[str, Any]) -> list[AnalysisTiming]:
    """Measures the graph of a job in this process.

    Raises:
        GraphError: The graph cannot be run.
    """
    graph = GraphSpec.model_validate_json(json.dumps(job["graph"]))
    before = _resident_mib("VmRSS")
    try:
        engine = OnnxEngine(Path(job["path"]), graph, pad_id=job["pad_id"], padding_side="right")
        return [_measure_length(engine, length, job, before) for length in job["lengths"]]
    except BertServeError as error:
        raise GraphError(str(error)) from error


def _measure_length(engine: OnnxEngine, length: int, job: Mapping[str, Any], before: float | None) -> AnalysisTiming:
    text = Encoding(np.full(length, job["pad_id"], dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(min(1, length - 1),))
    alone, alone_cpu = _run(engine, [text], job["seconds"] / 2)
    batches, batches_cpu = _run(engine, [text] * job["batch"], job["seconds"] / 2)
    peak = _resident_mib("VmHWM")
    return AnalysisTiming(
        length=length,
        latency_ms=1000 * statistics.median(alone),
        latency_p90_ms=1000 * sorted(alone)[min(int(0.9 * len(alone)), len(alone) - 1)],
        latency_cpu_ms=1000 * statistics.median(alone_cpu),
        runs=len(alone),
        batch=job["batch"],
        texts_per_s=job["batch"] / statistics.median(batches),
        cpu_ms=1000 * statistics.median(batches_cpu) / job["batch"],
        memory_mib=None if peak is None or before is None else peak - before,
    )


def _run(engine: OnnxEngine, batch: Sequence[Encoding], seconds: float) -> tuple[list[float], list[float]]:
    """Returns the seconds and the CPU seconds of each run, after one run that is not timed."""
    engine.run(batch)
    times: list[float] = []
    cpu_times: list[float] = []
    min_runs, max_runs = RUNS
    while not times or (len(times) < max_runs and sum(times) < (seconds if len(times) >= min_runs else PATIENCE * seconds)):
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.run(batch)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
    return times, cpu_times


def _resident_mib(field: str) -> float | None:
    """Returns a memory value of this process; `VmHWM`, the peak, starts anew with the program."""
    try:
        match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1]) * 1024 / _MIB
