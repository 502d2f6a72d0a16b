"""Times a graph on this machine: one text alone, at a few lengths. A small table for the manifest, no benchmark."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from service.backend.hardware import cpu_name
from service.backend.onnx_engine import Engine
from service.bundle.graph_spec import Speed, Timing
from service.text.tokenizer import Encoding

LENGTHS = (16, 64, 128)  # and the model's own
SECONDS = 0.5
RUNS = (3, 15)

# How /proc/cpuinfo calls what matrix products are made of, on x86 and Arm; AVX-512 and VNNI decide the speed of int8.
INSTRUCTIONS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


def measure(engine: Engine, *, max_length: int, pad_id: int, threads: int = 1) -> Speed:
    """Times runs of one text at each length.

    Args:
        engine: The graph.
        max_length: The model's usable length in tokens; it is timed too.
        pad_id: A token id that the model has.
        threads: Threads of the engine, for the record.
    """
    cpu, instructions = processor()
    lengths = sorted({min(length, max_length) for length in (*LENGTHS, max_length)})
    timings = tuple(Timing(length=length, median_ms=_median_ms(engine, length, pad_id)) for length in lengths)
    return Speed(cpu=cpu, instructions=instructions, threads=threads, timings=timings)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """Returns the processor's name and those of its instruction sets that matter; elsewhere than on Linux, its kind alone."""
    flags: set[str] = set()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features"):
                flags.update(value.split())
    return cpu_name(cpuinfo), tuple(flag for flag in INSTRUCTIONS if flag in flags)


def _median_ms(engine: Engine, length: int, pad_id: int) -> float:
    batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
    engine.run(batch)
    seconds: list[float] = []
    least, most = RUNS
    while len(seconds) < least or (len(seconds) < most and sum(seconds) < SECONDS):
        start = time.perf_counter()
        engine.run(batch)
        seconds.append(time.perf_counter() - start)
    return round(1000 * statistics.median(seconds), 3)
