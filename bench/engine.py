"""The engine throughput: the speed of a bundle's graph, or of another graph of the same model, in a loop without other work.

Bodies become encodings exactly like in the service, including windows, but before the loop. The loop times `session.run` of single rows
on several threads with one session, whose runs have one thread each. It has no HTTP, queue, batches or decoding. So this is
the speed for a caller with direct access to the session.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.bench.bodies import NO_LIMITS, Body
from bertserve.bench.errors import BenchError
from bertserve.bench.progress import BenchProgress
from bertserve.service.backend.sessions import session_options
from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BertServeError, plural
from bertserve.service.tasks.batch import TaskModel, first_batch
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.wire.reading import parse_json, requested_task, validate_as

Feed = dict[str, NDArray[Any]]

_WARMUP_SHARE = 0.1  # relative to the measured time
# inputs of other exporters' graphs, by name -> their content
_STOCK_INPUTS = {
    "input_ids": "token_ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "mask_index": "mask_index",
    "attention_index": "attention_index",
}


@dataclass(frozen=True, slots=True)
class EncodedBodies:
    """The graph runs of some bodies.

    Attributes:
        feeds: For each body, the inputs of its runs: one run per text, or one per window of a long text.
        lengths: For each body, the length of each run in tokens, including special tokens.
        texts: For each body, its number of texts.
    """

    feeds: Sequence[Sequence[Feed]]
    lengths: Sequence[Sequence[int]]
    texts: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each body, including special tokens."""
        return [sum(lengths) for lengths in self.lengths]


@dataclass(frozen=True, slots=True)
class EngineThroughput:
    """The metrics of one raw ONNX Runtime loop. The field names are those of the JSON report.

    Attributes:
        threads: Number of threads that ran the graph.
        seconds: Measured time.
        runs: Number of runs of the graph.
        runs_per_s: Runs per second, summed over threads.
        requests_per_s: Bodies per second that correspond to these runs.
        texts_per_s: Texts per second.
        tokens_per_s: Tokens per second.
        run_ms: Mean time of a run in milliseconds, while other threads run too.
        feed_s: For each body, the median time of each of its runs in seconds.
    """

    threads: int
    seconds: float
    runs: int
    runs_per_s: float
    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    run_ms: float
    feed_s: Sequence[Sequence[float]]


def summarize_runs(encoded: EncodedBodies, runs: Sequence[tuple[int, int, float]], threads: int, seconds: float) -> EngineThroughput:
    """Returns the metrics of a raw ONNX Runtime loop.

    Args:
        encoded: The bodies of the runs.
        runs: For each run, `(index of the body, index of the run in the body, seconds)`.
        threads: Number of threads that ran the graph.
        seconds: Measured time.
    """
    times: dict[tuple[int, int], list[float]] = {}
    for body, part, duration in runs:
        times.setdefault((body, part), []).append(duration)
    mean = statistics.fmean(duration for _, _, duration in runs) if runs else 0.0
    span = seconds or 1.0
    shares = [1 / len(feeds) for feeds in encoded.feeds]  # the part of a body per run
    return EngineThroughput(
        threads=threads,
        seconds=seconds,
        runs=len(runs),
        runs_per_s=len(runs) / span,
        requests_per_s=sum(shares[body] for body, _, _ in runs) / span,
        texts_per_s=sum(shares[body] * encoded.texts[body] for body, _, _ in runs) / span,
        tokens_per_s=sum(encoded.lengths[body][part] for body, part, _ in runs) / span,
        run_ms=mean * 1000,
        # a short loop may not reach the last text of a workload, which then gets the mean
        feed_s=[[statistics.median(times.get((i, k), [mean])) for k in range(len(feeds))] for i, feeds in enumerate(encoded.feeds)],
    )


class OnnxLoop:
    """A bundle's tokenizer, and an onnxruntime session with its graph or another one."""

    def __init__(self, path: Path, graph: Path | None = None) -> None:
        """Loads the bundle in a folder, and creates a session of its default graph for the CPU, or of another ONNX file.

        Raises:
            BenchError: The bundle is broken, or the graph cannot be loaded, or has an unknown input.
        """
        try:
            self.bundle: Bundle = files.load_bundle(path)
            spec = self.bundle.graph("cpu")
            self._tokenizer = Tokenizer(self.bundle.tokenizer_path, self.bundle.manifest.tokenizer)
        except BertServeError as error:
            raise BenchError(error.message) from error
        self.graph = graph or path / spec.file
        self._session = _create_session(self.graph, as_written=graph is None)
        fills = _STOCK_INPUTS | ({} if graph else {input_spec.name: input_spec.fill for input_spec in spec.inputs})
        self._inputs: list[tuple[str, str, Any]] = []  # (name, content, dtype)
        for value in self._session.get_inputs():
            if value.name not in fills or value.type not in ("tensor(int64)", "tensor(int32)"):
                raise BenchError(
                    f"`{self.graph}` has an input `{value.name}` of {value.type}; supported are int64 {', '.join(_STOCK_INPUTS)}."
                )
            self._inputs.append((value.name, fills[value.name], np.int32 if value.type == "tensor(int32)" else np.int64))

    @property
    def task(self) -> str:
        """The bundle's task."""
        return self.bundle.manifest.task

    @property
    def mask(self) -> str | None:
        """The spelling of the mask of the bundle's model, or None."""
        mask = self.bundle.manifest.tokenizer.mask
        return None if mask is None else mask.token

    def encode(self, bodies: Sequence[Body]) -> EncodedBodies:
        """Tokenizes bodies like the service, and builds the inputs of their runs.

        Raises:
            BenchError: The bundle's model does not support a body.
        """
        feeds, lengths = [], []
        for body in bodies:
            try:
                value = parse_json(body.content, TASKS[self.task].body)
                task = requested_task(self.task, value)
                model = TaskModel(self._tokenizer, self.bundle.manifest, Budget())
                encodings = [
                    encoding
                    for request in validate_as(TASKS[task].body, value, NO_LIMITS).requests(self.bundle.manifest)
                    for encoding in first_batch(TASKS[task].run, request, model).encodings
                ]
            except BertServeError as error:
                raise BenchError(f"bundle `{self.bundle.manifest.name}` ({self.task}) cannot take a body: {error.message}") from error
            feeds.append([self._feed(encoding) for encoding in encodings])
            lengths.append([len(encoding) for encoding in encodings])
        return EncodedBodies(feeds, lengths, [body.texts for body in bodies])

    def run_loop(self, encoded: EncodedBodies, *, threads: int, seconds: float, stop: threading.Event) -> EngineThroughput:
        """Runs the encoded bodies repeatedly in order, one row at a time per thread.

        There must be at least one run. A tenth of `seconds` more is run before the measured time. If `stop` is set, the loop ends early
        with the results so far.

        Raises:
            BenchError: A run failed.
        """
        order = [(i, k, feed) for i, feeds in enumerate(encoded.feeds) for k, feed in enumerate(feeds)]
        next_index = itertools.count().__next__
        start = time.perf_counter() + seconds * _WARMUP_SHARE
        end = start + seconds
        finished: list[list[tuple[int, float, float]]] = [[] for _ in range(threads)]
        failures: list[Exception] = []

        def loop(results: list[tuple[int, float, float]]) -> None:
            run, count = self._session.run, len(order)
            try:
                while True:
                    at = next_index() % count
                    before = time.perf_counter()
                    run(None, order[at][2])
                    now = time.perf_counter()
                    results.append((at, before, now))
                    if now >= end or stop.is_set():
                        return
            except Exception as error:  # noqa: BLE001  # onnxruntime's exceptions only share the base class Exception; reported below
                failures.append(error)

        workers = [threading.Thread(target=loop, args=(results,)) for results in finished]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise BenchError(f"`{self.graph}` failed on a text of the load: {failures[0]}") from failures[0]
        runs = [run for results in finished for run in results]
        end = min(end, max(now for _, _, now in runs))
        return summarize_runs(
            encoded,
            [(order[at][0], order[at][1], now - before) for at, before, now in runs if start < now <= end],
            threads,
            max(end - start, 0.0),
        )

    def _feed(self, encoding: Encoding) -> Feed:
        """Returns the inputs of one row, each of shape [1, length]; `mask_index` has shape [masks], `attention_index` [maps, 3]."""
        values: dict[str, NDArray[np.int64]] = {
            "token_ids": encoding.ids[None, :],
            "attention_mask": np.ones((1, len(encoding)), dtype=np.int64),
            "type_ids": encoding.type_ids[None, :],
            "mask_index": np.array(encoding.masks, dtype=np.int64),
            "attention_index": np.array([(layer, 0, head) for layer, head in encoding.maps], dtype=np.int64).reshape(-1, 3),
        }
        return {name: np.ascontiguousarray(values[fill].astype(kind)) for name, fill, kind in self._inputs}


def _create_session(path: Path, *, as_written: bool) -> Any:
    """Returns a session.

    Args:
        path: The ONNX file.
        as_written: Whether to run the graph with the service's options, as for a bundle's own graph. Otherwise onnxruntime optimizes it
            with its defaults, as for another graph.

    Raises:
        BenchError: onnxruntime cannot load the file.
    """
    options = session_options(1) if as_written else ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions only share the base class Exception
        raise BenchError(f"onnxruntime {ort.__version__} cannot load `{path}`: {error}") from error


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """A raw ONNX Runtime loop and its inputs; it ends early if `stop` is set."""

    engine: OnnxLoop
    encoded: EncodedBodies
    threads: int
    stop: threading.Event
    progress: BenchProgress

    def measure_throughput(self, seconds: float) -> EngineThroughput:
        """Runs the raw ONNX Runtime loop for this many seconds."""
        self.progress.start(f"engine alone on {plural(self.threads, 'thread')}, {seconds:g} s")
        return self.engine.run_loop(self.encoded, threads=self.threads, seconds=seconds, stop=self.stop)

    def describe(self) -> dict[str, Any]:
        """Returns the entry of a report: bundle, graph, precision, version of onnxruntime, threads."""
        bundle = self.engine.bundle
        spec = bundle.graph("cpu")
        is_bundle_graph = self.engine.graph == bundle.path / spec.file
        return {
            "bundle": bundle.manifest.name,
            "digest": bundle.version,
            "graph": self.engine.graph.name,
            "graph_sha256": spec.identity if is_bundle_graph else files.digest(self.engine.graph),
            "onnxruntime": ort.__version__,
            "precision": spec.precision if is_bundle_graph else None,
            "threads": self.threads,
        }
