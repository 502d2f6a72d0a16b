"""Times a graph on this machine, one text alone at a few lengths: a small table for the manifest, and no benchmark."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from bertserve.service.backend.hardware import cpu_instructions, cpu_name
from bertserve.service.backend.onnx_engine import Engine
from bertserve.service.bundle.graph_spec import Speed, Timing
from bertserve.service.text.tokenizer import Encoding

LENGTHS = (16, 64, 128)  # tokens; the model's own length is timed too
MAX_SECONDS = 0.5  # for each length
RUNS = (3, 15)  # at least, at most


def measure_latency(engine: Engine, *, max_length: int, pad_id: int, threads: int = 1) -> Speed:
    """Times runs of one text at each length.

    Args:
        engine: The graph.
        max_length: The model's usable length in tokens.
        pad_id: A token id that the model has, which fills the texts.
        threads: The engine's number of threads, to be written down.
    """
    cpu, instructions = read_processor()
    lengths = sorted({min(length, max_length) for length in (*LENGTHS, max_length)})
    timings = tuple(Timing(length=length, median_ms=_median_ms(engine, length, pad_id)) for length in lengths)
    return Speed(cpu=cpu, instructions=instructions, threads=threads, timings=timings)


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """Returns the processor's name and its instruction sets that decide the speed of matrix products; on other systems than Linux, its kind alone."""
    return cpu_name(cpuinfo), cpu_instructions(cpuinfo)


def _median_ms(engine: Engine, length: int, pad_id: int) -> float:
    """Returns the median milliseconds of one text, after one run that is not timed."""
    batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
    engine.run(batch)
    seconds: list[float] = []
    least, most = RUNS
    while len(seconds) < least or (len(seconds) < most and sum(seconds) < MAX_SECONDS):
        start = time.perf_counter()
        engine.run(batch)
        seconds.append(time.perf_counter() - start)
    return round(1000 * statistics.median(seconds), 3)
