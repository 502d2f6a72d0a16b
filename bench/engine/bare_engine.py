"""The bare engine: the graph of a bundle, or another graph of the same model, in a loop with nothing around it.

Bodies become encodings exactly as in the service, windows included, but before the loop. The loop times `session.run` of one row alone,
on several threads over one session that uses one thread for each run. There is no HTTP, no queue, no batching and no decoding: this is
the speed that a caller with direct access to the session would see.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.bench.engine.limit import EncodedBodies, EngineLimit, Feed, summarize_runs
from bertserve.bench.errors import BenchError
from bertserve.bench.workload.bodies import Body
from bertserve.service.bundle import files
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BertServeError
from bertserve.service.tasks.batch import TaskModel, first_batch
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.wire.reading import parse_json, requested_task, validate_body

VERSION: str = ort.__version__
_UNLIMITED = Limits(max_inputs=1_000_000, max_chars=100_000_000)
_WARMUP_SHARE = 0.1  # of the measured time, before it
# inputs of exports that are not ours, by name -> what fills them
_STOCK_INPUTS = {
    "input_ids": "token_ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
    "mask_index": "mask_index",
    "attention_index": "attention_index",
}


class BareEngine:
    """A bundle's tokenizer, and one onnxruntime session over its graph or over another one."""

    def __init__(self, path: Path, graph: Path | None = None) -> None:
        """Loads the bundle and creates the session.

        Args:
            path: Folder of the bundle.
            graph: ONNX file to run in place of the bundle's default graph for the CPU.

        Raises:
            BenchError: The bundle is broken, or the graph cannot be loaded, or it has an input that is not known.
        """
        try:
            self.bundle: Bundle = files.load_bundle(path)
            spec = self.bundle.graph("cpu")
            self._tokenizer = Tokenizer(self.bundle.tokenizer_path, self.bundle.manifest.tokenizer)
        except BertServeError as error:
            raise BenchError(error.message) from error
        self.graph = graph or path / spec.file
        self._session = _create_session(self.graph, as_written=graph is None)
        fills = _STOCK_INPUTS | ({} if graph else {given.name: given.fill for given in spec.inputs})
        self._inputs: list[tuple[str, str, Any]] = []  # (name, what fills it, dtype)
        for given in self._session.get_inputs():
            if given.name not in fills or given.type not in ("tensor(int64)", "tensor(int32)"):
                raise BenchError(f"`{self.graph}` has an input `{given.name}` of {given.type}; known are int64 {', '.join(_STOCK_INPUTS)}.")
            self._inputs.append((given.name, fills[given.name], np.int32 if given.type == "tensor(int32)" else np.int64))

    @property
    def task(self) -> str:
        """The bundle's task."""
        return self.bundle.manifest.task

    @property
    def mask(self) -> str | None:
        """How the bundle's model spells a word that it is to fill in, or None."""
        mask = self.bundle.manifest.tokenizer.mask
        return None if mask is None else mask.token

    def encode(self, bodies: Sequence[Body]) -> EncodedBodies:
        """Tokenizes bodies as the service does, and builds the inputs of their runs.

        Raises:
            BenchError: The bundle's model cannot take a body.
        """
        feeds, lengths = [], []
        for body in bodies:
            try:
                value = parse_json(body.content, TASKS[self.task].body)
                task = requested_task(self.task, value)
                model = TaskModel(self._tokenizer, self.bundle.manifest, Budget())
                encodings = [
                    encoding
                    for request in validate_body(task, value, _UNLIMITED).requests(self.bundle.manifest)
                    for encoding in first_batch(TASKS[task].run, request, model).encodings
                ]
            except BertServeError as error:
                raise BenchError(f"bundle `{self.bundle.manifest.name}` ({self.task}) cannot take a body: {error.message}") from error
            feeds.append([self._feed(encoding) for encoding in encodings])
            lengths.append([len(encoding) for encoding in encodings])
        return EncodedBodies(feeds, lengths, [body.texts for body in bodies])

    def run_loop(self, encoded: EncodedBodies, *, threads: int, seconds: float, stop: threading.Event) -> EngineLimit:
        """Runs the encoded bodies again and again, in order, one row at a time on each thread.

        Args:
            encoded: At least one run.
            threads: Number of threads that run the graph at the same time, over one session.
            seconds: Measured time; a tenth more is run before it.
            stop: Set by Ctrl-C; ends the loop early with what was measured.

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
            except Exception as error:  # noqa: BLE001  # onnxruntime's exceptions share no base class but Exception; reported below
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
        as_written: True runs the graph with the options of the service, as for a bundle's own graph. False lets onnxruntime optimize it
            with its defaults, as for another graph.

    Raises:
        BenchError: onnxruntime cannot load the file.
    """
    options = ort.SessionOptions()
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        # two threads on one session's arena are up to a third slower, and the service runs without it
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class but Exception
        raise BenchError(f"onnxruntime {ort.__version__} cannot load `{path}`: {error}") from error
