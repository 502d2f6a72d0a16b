"""Writes the first measurements on a GPU: `PYTHONPATH=.:tests python bench/scripts/gpu_first_run.py --bundle DIR --output FILE`.

The bundle is that of a task with texts, with graphs for the CPU and for CUDA in fp32 and fp16. Without a GPU, its graphs for the CPU are
measured. The Markdown report names what could not be measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import distributions
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.bench import target, workloads
from bertserve.bench.generator import Load, send_loads
from bertserve.bench.measurement import summarize
from bertserve.bench.raw_loop import encode_bodies
from bertserve.service.bundle.files import load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine import hardware
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.engine.sessions import unavailable_reason
from bertserve.service.errors import BertServeError, StartError
from bertserve.service.providers import GpuOptions
from bertserve.service.tasks.catalog import TASKS
from support.replica import running  # type: ignore[import-not-found]  # of the tests

SHAPES = "1x32,1x512,8x128,8x512,32x32,32x128,128x64,16x512,32x512"
SERVICES = "1x1,1x2,1x4,4x4,8x8"
RUNS = 10  # of a shape, of which the fastest counts
START_S = 60  # seconds to start a service, which warms up all shapes
LIST = 64  # texts of a long request
# the kernel of a layer's attention, in the output of ONNX Runtime with the variable
KERNEL, KERNEL_VARIABLE = re.compile(r"SdpaKernel=(\w+)"), "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and writes the report after each section."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the report")
    parser.add_argument("--kernels", metavar="PRECISION", help=argparse.SUPPRESS)  # runs one batch, in a process of its own
    parser.add_argument("--texts", type=int, default=300, help="texts to compare with the CPU (default: 300)")
    parser.add_argument("--shapes", default=SHAPES, help="rows x tokens of the timed runs (default: %(default)s)")
    parser.add_argument("--services", default=SERVICES, help="workers x threads of the services (default: %(default)s)")
    parser.add_argument("--load-s", type=float, default=3.0, help="seconds of each load, after a third as warm-up (default: 3)")
    parser.add_argument("--clients", type=int, default=4, help="processes that send load (default: 4)")
    parser.add_argument("--limit-s", type=float, default=480, help="seconds after which nothing more is measured (default: 480)")
    args = parser.parse_args(argv)
    try:
        run = FirstRun(args.bundle, limit_s=args.limit_s)
    except BertServeError as error:
        parser.error(str(error))
    if args.kernels:
        run.engine(run.graphs[args.kernels]).warm_up(rows=8, length=64)
        return
    model = f"Model: {run.manifest.name} ({run.manifest.task}), on {run.provider}."
    lines = ["# First run on a GPU", "", f"{model} Written by `bench/scripts/gpu_first_run.py`."]
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "Libraries and kernels": run.libraries,
        f"Against the CPU, {args.texts} texts": partial(run.agreement, args.texts),
        "Time of a run": partial(run.times, args.shapes),
        "The service": partial(run.services, args.services, args.clients, args.load_s),
    }
    for title, section in sections.items():
        lines += ["", f"## {title}", ""]
        try:
            for line in section():
                lines.append(line)  # one by one, because an error ends the section
        except Exception as error:  # noqa: BLE001 - the boundary of a section: the next one may work
            lines += [_missing(error)] if not lines[-1] else ["", _missing(error)]
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


class FirstRun:
    """The measurements; each method yields the lines of a section."""

    def __init__(self, bundle: Path, *, limit_s: float) -> None:
        self.limit_s, self.end = limit_s, time.monotonic() + limit_s
        self.bundle = load_bundle(bundle.resolve())
        self.manifest = self.bundle.manifest
        reason = unavailable_reason("cuda")
        self.without_gpu = None if reason is None else reason.partition(";")[0]
        self.provider = "cuda" if self.without_gpu is None else "cpu"
        self.graphs: dict[str, GraphSpec] = {graph.precision: graph for graph in self.manifest.graphs if graph.provider == self.provider}
        if not self.graphs:
            raise StartError(f"`{bundle}` has no graph for {self.provider}; export it with --provider cpu,cuda.")

    def engine(self, graph: GraphSpec, **options: Any) -> OnnxEngine:
        """Opens a graph with options of `OnnxEngine`."""
        spec = self.manifest.tokenizer
        return OnnxEngine(self.bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, **options)

    def check_time(self, needed_s: float = 0.0) -> None:
        """Raises an error if the time limit is reached before a measurement of so many seconds ends."""
        if time.monotonic() + needed_s > self.end:
            raise StartError(f"the limit of {self.limit_s:g} s (--limit-s)")

    def libraries(self) -> Iterator[str]:
        """Names hardware, packages, and the kernels of attention."""
        yield f"- CPU: {hardware.cpu_name()}, {hardware.usable_cores()} cores"
        names = re.compile(r"(onnxruntime|tensorrt|nvidia-c|numpy|tokenizers)", re.IGNORECASE)
        versions = {f"{package.name} {package.version}" for package in distributions() if names.match(package.name)}
        yield f"- packages: {', '.join(sorted(versions))}"
        for precision in self.graphs:
            self.check_time(START_S)
            command = [sys.executable, __file__, "--bundle", str(self.bundle.path), "--output", os.devnull, "--kernels", precision]
            kernels = Counter(KERNEL.findall(_output(command, timeout=START_S, **{KERNEL_VARIABLE: "1"})))
            shown = ", ".join(f"{name} ({number})" for name, number in kernels.items())
            yield f"- kernels of attention, {precision}: {shown or _missing(f'ONNX Runtime names none on {self.provider}')}"
        if self.without_gpu is not None:
            raise StartError(f"GPU: {self.without_gpu}")
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        yield f"- GPU: {_output(command, timeout=30).strip()}"

    def agreement(self, texts: int) -> Iterator[str]:
        """Compares the first output of each graph with that of the CPU in float32."""
        bodies = chain.from_iterable(target.build_bodies("uniform", seed=seed) for seed in count())
        encodings = list(chain.from_iterable(encode_bodies(self.bundle, list(islice(bodies, texts)))))
        reference = self.bundle.graph("cpu", "fp32")
        name = reference.outputs[0].name

        def outputs(graph: GraphSpec) -> list[Any]:
            engine = self.engine(graph, threads=hardware.usable_cores() if graph.provider == "cpu" else 1)
            rows = []
            for start in range(0, len(encodings), 8):
                self.check_time()
                rows += [row[name].astype(np.float32) for row in engine.run(encodings[start : start + 8])]
            return rows

        expected = outputs(reference)
        largest = max(float(np.abs(row).max()) for row in expected)
        yield f"| graph | largest error of `{name}` | its largest value | texts with equal decisions |\n|---|---|---|---|"
        for graph in self.graphs.values():
            pairs = list(zip(expected, outputs(graph), strict=True))
            error = max(float(np.abs(a - b).max()) for a, b in pairs)
            equal = sum(np.array_equal(a.argmax(axis=-1), b.argmax(axis=-1)) for a, b in pairs)
            yield f"| {graph.name} | {error:.2g} | {largest:.3g} | {equal} of {len(pairs)} |"

    def times(self, shapes: str) -> Iterator[str]:
        """Times runs of the service's engine in milliseconds, with and without CUDA graphs."""
        engines = {precision: self.engine(graph) for precision, graph in self.graphs.items()}
        if self.without_gpu is None and "fp16" in self.graphs:
            engines["fp16, CUDA graphs"] = self.engine(self.graphs["fp16"], gpu=GpuOptions(cuda_graphs=True))  # of small runs
        yield f"The fastest of {RUNS} runs.\n"
        yield f"| texts x tokens | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}"
        for shape in shapes.split(","):
            rows, length = map(int, shape.split("x"))
            cells = []
            for engine in engines.values():
                self.check_time()
                try:
                    engine.warm_up(rows, length)
                    [(_, _, seconds)] = engine.time_runs([(rows, length)], repeats=RUNS)
                    cells.append(f"{1000 * seconds:.2f}")
                except BertServeError as error:  # a shape can be too large
                    cells.append(f"missing ({type(error).__name__})")
            yield f"| {rows} x {length} | {' | '.join(cells)} |"
        if self.without_gpu is not None:
            yield f"\n{_missing('CUDA graphs: ' + self.without_gpu)}"

    def services(self, services: str, processes: int, load_s: float) -> Iterator[str]:
        """Loads the service with different flags, in a closed loop from several processes."""

        def texts_per_s(url: str, texts: int, connections: int) -> str:
            loads = [pool.submit(load_texts_per_s, url, texts, max(connections // processes, 1), load_s) for _ in range(processes)]
            return f"{sum(future.result() for future in loads):,.0f}"

        yield "Texts per second. 64 connections, or 16 for lists.\n"
        yield f"| workers | threads | single short texts | lists of {LIST} | single texts of 400 words |\n|---|---|---|---|---|"
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            texts, long = workloads.workload_inputs("long"), Path(folder) / "long.jsonl"
            long.write_text("".join(json.dumps(" ".join(three)) + "\n" for three in zip(texts, texts[1:], texts[2:], strict=False)))
            for service in services.split(","):
                workers, threads = service.split("x")
                self.check_time(START_S + 4 * load_s)
                flags = ("--provider", self.provider, "--workers", workers, "--threads", threads)
                with running(self.bundle.path, Path(folder) / "log", *flags) as replica:
                    cells = [
                        texts_per_s(f"{replica.url}/{TASKS[self.manifest.task].path}={workload}", size, connections)
                        for workload, size, connections in (("short", 1, 64), ("short", LIST, 16), (str(long), 1, 64))
                    ]
                yield f"| {workers} | {threads} | {' | '.join(cells)} |"


def load_texts_per_s(url: str, texts: int, connections: int, seconds: float) -> float:
    """Runs a closed loop; returns the answered texts per second."""
    load = Load(target.probe_target(url, {}, texts=texts, seed=0), connections, seconds=seconds, warmup_s=seconds / 3, timeout_s=30)
    send_loads([load], threading.Event())
    return summarize("", load, {}, open_loop=False).texts_per_s


def _output(command: Sequence[str], *, timeout: float, **variables: str) -> str:
    """Returns what a command prints."""
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout, check=False)  # noqa: S603
    if done.returncode:
        raise StartError(f"`{command[0]}` failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout + done.stderr


def _missing(reason: object) -> str:
    kind = "" if isinstance(reason, str | BertServeError) else f"{type(reason).__name__}: "
    return f"**Missing:** {kind}{reason}"


if __name__ == "__main__":
    main()
