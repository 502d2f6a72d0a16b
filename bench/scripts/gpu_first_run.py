"""Writes the first measurements on a GPU to a Markdown report: `python bench/scripts/gpu_first_run.py --bundle DIR --output FILE`.

The bundle is that of a task with texts, with graphs for the CPU and for CUDA in fp32 and fp16. Without a GPU, its graphs for the CPU are
measured. The report names what could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from itertools import chain, count, islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.bench import BenchError, target, workloads
from bertserve.bench.generator import Load
from bertserve.bench.measurement import summarize
from bertserve.bench.raw_loop import encode_bodies
from bertserve.service.bundle.files import load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine import hardware
from bertserve.service.engine.onnx_engine import OnnxEngine, build_feed
from bertserve.service.engine.sessions import new_tensor, open_session, run_options, unavailable_reason
from bertserve.service.errors import BertServeError
from bertserve.service.providers import GpuOptions
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.text.tokenizer import Encoding

SHAPES = "1x32,1x512,8x128,8x512,32x32,32x128,128x64,16x512,32x512"
SERVICES = "1x1,1x2,1x4,4x4,8x8"
MAX_RUNS, MAX_RUN_S = 30, 0.5  # runs of a shape, and their seconds, after which its timing ends
START_S = 60  # to start a service, which warms up all shapes
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
    parser.add_argument("--load-s", type=float, default=3.0, help="measured seconds of each load (default: 3)")
    parser.add_argument("--warmup-s", type=float, default=1.0, help="uncounted seconds before each load (default: 1)")
    parser.add_argument("--clients", type=int, default=4, help="processes that send load (default: 4)")
    parser.add_argument("--limit-s", type=float, default=480, help="seconds after which nothing more is measured (default: 480)")
    args = parser.parse_args(argv)
    try:
        run = FirstRun(args)
    except (BenchError, BertServeError) as error:
        parser.error(str(error))
    if args.kernels:
        run.engine(run.graphs[args.kernels]).run([Encoding(np.ones(64, dtype=np.int64), np.zeros(64, dtype=np.int64))] * 8)
        return
    model = f"Model: {run.manifest.name} ({run.manifest.task}), on {run.provider}."
    lines = ["# First run on a GPU", "", f"{model} Written by `bench/scripts/gpu_first_run.py`."]
    sections = {
        "Libraries and kernels": run.libraries,
        f"Against the CPU, {args.texts} texts": run.agreement,
        "Time of a run": run.times,
        "The service": run.services,
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

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.monotonic() + args.limit_s
        self.bundle = load_bundle(args.bundle.resolve())
        self.manifest = self.bundle.manifest
        reason = unavailable_reason("cuda")
        self.without_gpu = None if reason is None else reason.partition(";")[0]
        self.provider = "cuda" if self.without_gpu is None else "cpu"
        self.graphs: dict[str, GraphSpec] = {graph.precision: graph for graph in self.manifest.graphs if graph.provider == self.provider}
        if not self.graphs:
            raise BenchError(f"`{args.bundle}` has no graph for {self.provider}; export it with --provider cpu,cuda.")

    def engine(self, graph: GraphSpec, threads: int = 1) -> OnnxEngine:
        """Opens a graph."""
        spec = self.manifest.tokenizer
        return OnnxEngine(self.bundle.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, threads=threads)

    def check_time(self, needed_s: float = 0.0) -> None:
        """Raises an error if the time limit is reached before a measurement of so many seconds ends."""
        if time.monotonic() + needed_s > self.end:
            raise BenchError(f"the limit of {self.args.limit_s:g} s (--limit-s)")

    def libraries(self) -> Iterator[str]:
        """Names hardware, packages, and the kernels of attention."""
        yield f"- CPU: {hardware.cpu_name()}, {hardware.usable_cores()} cores"
        names = re.compile(r"(onnxruntime|tensorrt|nvidia-c|numpy|tokenizers)", re.IGNORECASE)
        versions = {f"{package.name} {package.version}" for package in distributions() if names.match(package.name)}
        yield f"- packages: {', '.join(sorted(versions))}"
        for precision in self.graphs:
            self.check_time(START_S)
            command = [sys.executable, __file__, "--bundle", str(self.bundle.path), "--output", os.devnull]
            command += ["--kernels", precision]
            kernels = Counter(KERNEL.findall(_output(command, timeout=START_S, **{KERNEL_VARIABLE: "1"})))
            shown = ", ".join(f"{name} ({number})" for name, number in kernels.items())
            yield f"- kernels of attention, {precision}: {shown or _missing(f'ONNX Runtime names none on {self.provider}')}"
        if self.without_gpu is not None:
            raise BenchError(f"GPU: {self.without_gpu}")
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        yield f"- GPU: {_output(command, timeout=30).strip()}"

    def agreement(self) -> Iterator[str]:
        """Compares the first output of each graph with that of the CPU in float32."""
        bodies = chain.from_iterable(target.build_bodies("uniform", seed=seed) for seed in count())
        texts = encode_bodies(self.bundle, list(islice(bodies, self.args.texts)))
        encodings = [replace(encoding, small_outputs=False) for encoding in chain.from_iterable(texts)]
        reference = self.bundle.graph("cpu", "fp32")
        name = reference.outputs[0].name

        def outputs(graph: GraphSpec) -> list[Any]:
            engine = self.engine(graph, hardware.usable_cores() if graph.provider == "cpu" else 1)
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

    def times(self) -> Iterator[str]:
        """Times runs in milliseconds: with numpy arrays as in the service, with inputs and outputs on the device, and as a CUDA graph."""
        kinds = ("numpy", "bound", "CUDA graph") if self.without_gpu is None else ("numpy", "bound")
        sessions = []
        for graph, kind in product(self.graphs.values(), kinds):
            path, gpu = self.bundle.path / graph.file, GpuOptions(cuda_graphs=kind == "CUDA graph")
            sessions.append((graph, kind, open_session(path, graph, provider=graph.provider, gpu=gpu)))
        heads = "".join(f" {graph.precision}, {kind} |" for graph, kind, _ in sessions)
        yield f"| texts x tokens |{heads}\n|---|{'---|' * len(sessions)}"
        for graph_id, shape in enumerate(self.args.shapes.split(","), start=1):  # ONNX Runtime reserves 0
            rows, length = map(int, shape.split("x"))
            cells = []
            for graph, kind, session in sessions:
                self.check_time(2 * MAX_RUN_S)
                try:
                    cells.append(f"{self._run_ms(session, graph, rows, length, kind, graph_id):.2f}")
                except Exception as error:  # noqa: BLE001 - a shape can be too large; onnxruntime's pybind exceptions share no base class
                    cells.append(f"missing ({type(error).__name__})")
            yield f"| {rows} x {length} | {' | '.join(cells)} |"
        if self.without_gpu is not None:
            yield f"\n{_missing('CUDA graphs: ' + self.without_gpu)}"

    def _run_ms(self, session: Any, graph: GraphSpec, rows: int, length: int, kind: str, graph_id: int) -> float:
        """Returns the median milliseconds of a run."""
        encoding = Encoding(np.ones(length, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(length - 1,))
        inputs = build_feed([encoding] * rows, graph.inputs, (rows, length))
        names = [spec.name for spec in graph.small_outputs or graph.outputs]
        run: Callable[[], object] = partial(session.run, names, inputs)
        if kind != "numpy":
            arrays = session.run(names, inputs, run_options(-1) if kind == "CUDA graph" else None)
            tensors = {name: new_tensor(array, (self.provider, 0)) for name, array in (*inputs.items(), *zip(names, arrays, strict=True))}
            binding = session.io_binding()
            for name, array in inputs.items():
                tensors[name].update_inplace(array)
                binding.bind_ortvalue_input(name, tensors[name])
            for name in names:
                binding.bind_ortvalue_output(name, tensors[name])
            run = partial(session.run_with_iobinding, binding, run_options(graph_id) if kind == "CUDA graph" else None)
        run()
        seconds: list[float] = []
        while len(seconds) < MAX_RUNS and sum(seconds) < MAX_RUN_S:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return 1000 * statistics.median(seconds)

    def services(self) -> Iterator[str]:
        """Loads the service with different flags, in a closed loop."""
        yield "Texts per second. 64 connections, or 16 for lists.\n"
        yield f"| workers | threads | single short texts | lists of {LIST} | single texts of 400 words |\n|---|---|---|---|---|"
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(self.args.clients, get_context("spawn")) as clients:
            texts, long = workloads.workload_inputs("long"), Path(folder) / "long.jsonl"
            long.write_text("".join(json.dumps(" ".join(three)) + "\n" for three in zip(texts, texts[1:], texts[2:], strict=False)))
            for service in self.args.services.split(","):
                workers, threads = service.split("x")
                self.check_time(START_S + 3 * (self.args.load_s + self.args.warmup_s))
                with self._serving("--workers", workers, "--threads", threads) as url:
                    cells = [
                        self._texts_per_s(clients, f"{url}/{TASKS[self.manifest.task].path}={workload}", size, connections)
                        for workload, size, connections in (("short", 1, 64), ("short", LIST, 16), (str(long), 1, 64))
                    ]
                yield f"| {workers} | {threads} | {' | '.join(cells)} |"

    def _texts_per_s(self, clients: ProcessPoolExecutor, url: str, texts: int, connections: int) -> str:
        """Loads a target from all client processes; returns the sum of their answered texts per second."""
        load = url, texts, max(connections // self.args.clients, 1), self.args.load_s, self.args.warmup_s
        loads = [clients.submit(load_texts_per_s, *load) for _ in range(self.args.clients)]
        return f"{sum(future.result() for future in loads):,.0f}"

    @contextmanager
    def _serving(self, *flags: str) -> Iterator[str]:
        """Runs a service in the default precision of its provider; yields its address."""
        command = [sys.executable, "-m", "bertserve.service.cli", "serve", "--model", str(self.bundle.path), "--provider", self.provider]
        process = subprocess.Popen([*command, "--port", "0", *flags], stdout=subprocess.PIPE, text=True)  # noqa: S603
        timer = threading.Timer(START_S, process.kill)  # ends the wait for its first lines
        timer.start()
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if " listens on " in line), None)
            timer.cancel()
            if line is None:
                raise BenchError(f"the service with {' '.join(flags)} did not start within {START_S} s")
            yield line.split(" listens on ")[1].split(",")[0].strip()
        finally:
            process.terminate()
            process.communicate()


def load_texts_per_s(url: str, texts: int, connections: int, seconds: float, warmup_s: float) -> float:
    """Runs a closed loop; returns the answered texts per second."""
    probed, _ = target.probe_target(url, {}, texts=texts, seed=0)
    load = Load(probed, connections, seconds=seconds, warmup_s=warmup_s, timeout_s=30)
    load.run(threading.Event())
    return summarize("", load, open_loop=False).texts_per_s


def _output(command: Sequence[str], *, timeout: float, **variables: str) -> str:
    """Returns what a command prints."""
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout, check=False)  # noqa: S603
    if done.returncode:
        raise BenchError(f"`{command[0]}` failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout + done.stderr


def _missing(reason: object) -> str:
    kind = "" if isinstance(reason, str | BenchError | BertServeError) else f"{type(reason).__name__}: "
    return f"**Missing:** {kind}{reason}"


if __name__ == "__main__":
    main()
