"""The engine's own limit: a bundle's graph, or another graph of the same model, in a loop with nothing around it.

Bodies become encodings exactly as in the service, windows included, but all of it beforehand: what is timed is
`session.run` of one row alone, on so many threads over one session of one thread each. No HTTP, no queue, no batching, no
decoding: what a caller who had the session in hand could get.
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

from bench.engine.limit import Limit, summary
from bench.engine.workload import Feed, Work
from bench.errors import BenchError
from bench.workload.bodies import Body
from service.bundle import files
from service.bundle.files import Bundle
from service.errors import BertServeError
from service.tasks.catalog import TASKS
from service.text.tokenizer import Encoding, Tokenizer
from service.wire.discriminator import requested_task
from service.wire.reading import Limits, read_body

VERSION: str = ort.__version__
_ANY = Limits(max_inputs=1_000_000, max_chars=100_000_000)
_WARMUP = 0.1  # share of the time
# names of inputs in exports that are not ours
_STOCK = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids", "mask_index": "mask_index"}


class BareEngine:
    """A bundle's tokenizer, and one session over its graph or over another one."""

    def __init__(self, path: Path, graph: Path | None = None) -> None:
        """Loads the bundle and makes the session.

        Args:
            path: The bundle's folder.
            graph: An ONNX file to run in place of the bundle's default graph for the CPU.

        Raises:
            BenchError: The bundle is broken, or the graph cannot be loaded or fed.
        """
        try:
            self.bundle: Bundle = files.load_bundle(path)
            spec = self.bundle.graph("cpu")
            self._tokenizer = Tokenizer(self.bundle.tokenizer_path, self.bundle.manifest.tokenizer)
        except BertServeError as error:
            raise BenchError(error.message) from error
        self.graph = graph or path / spec.file
        self._session = _session(self.graph, as_written=graph is None)
        fills = _STOCK | ({} if graph else {given.name: given.fill for given in spec.inputs})
        self._inputs: list[tuple[str, str, Any]] = []
        for given in self._session.get_inputs():
            if given.name not in fills or given.type not in ("tensor(int64)", "tensor(int32)"):
                raise BenchError(f"`{self.graph}` has an input `{given.name}` of {given.type}; known are int64 {', '.join(_STOCK)}.")
            self._inputs.append((given.name, fills[given.name], np.int32 if given.type == "tensor(int32)" else np.int64))

    @property
    def task(self) -> str:
        """The bundle's task."""
        return self.bundle.manifest.task

    def work(self, bodies: Sequence[Body]) -> Work:
        """Returns the runs that bodies need, ready to be run.

        Raises:
            BenchError: A body is not one of the bundle's task.
        """
        feeds, lengths = [], []
        for body in bodies:
            task = requested_task(self.task, body.content)
            try:
                encodings = [
                    encoding
                    for request in read_body(task, body.content, _ANY).requests(self.bundle.manifest)
                    for encoding in TASKS[task].encode(request, self._tokenizer).encodings
                ]
            except BertServeError as error:
                raise BenchError(f"bundle `{self.bundle.manifest.name}` ({self.task}) cannot take a body: {error.message}") from error
            feeds.append([self._feed(encoding) for encoding in encodings])
            lengths.append([len(encoding) for encoding in encodings])
        return Work(feeds, lengths, [body.texts for body in bodies])

    def measure(self, work: Work, *, threads: int, seconds: float, stop: threading.Event) -> Limit:
        """Runs the work again and again, in order, one row at a time on each thread.

        Args:
            work: At least one run.
            threads: Loops at the same time, over one session.
            seconds: Measured; a tenth more goes before it.
            stop: Set by Ctrl-C: ends early, with what there is.
        """
        order = [(i, k, feed) for i, feeds in enumerate(work.feeds) for k, feed in enumerate(feeds)]
        take = itertools.count().__next__
        start = time.perf_counter() + seconds * _WARMUP
        end = start + seconds
        finished: list[list[tuple[int, float, float]]] = [[] for _ in range(threads)]
        failures: list[Exception] = []

        def loop(mine: list[tuple[int, float, float]]) -> None:
            run, count = self._session.run, len(order)
            try:
                while True:
                    at = take() % count
                    before = time.perf_counter()
                    run(None, order[at][2])
                    now = time.perf_counter()
                    mine.append((at, before, now))
                    if now >= end or stop.is_set():
                        return
            except Exception as error:  # noqa: BLE001  # onnxruntime's exceptions share no base class but Exception; told below
                failures.append(error)

        workers = [threading.Thread(target=loop, args=(mine,)) for mine in finished]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise BenchError(f"`{self.graph}` failed on a text of the load: {failures[0]}") from failures[0]
        runs = [run for mine in finished for run in mine]
        end = min(end, max(now for _, _, now in runs))
        return summary(
            work,
            [(order[at][0], order[at][1], now - before) for at, before, now in runs if start < now <= end],
            threads,
            max(end - start, 0.0),
        )

    def _feed(self, encoding: Encoding) -> Feed:
        """Returns the inputs of one row, each [1, length]; the mask index is [masks]."""
        values: dict[str, NDArray[np.int64]] = {
            "token_ids": encoding.ids[None, :],
            "attention_mask": np.ones((1, len(encoding)), dtype=np.int64),
            "type_ids": encoding.type_ids[None, :],
            "mask_index": np.array(encoding.masks, dtype=np.int64),
        }
        return {name: np.ascontiguousarray(values[fill].astype(kind)) for name, fill, kind in self._inputs}


def _session(path: Path, *, as_written: bool) -> Any:
    """Returns a session; a bundle's own graph runs as the service runs it, another as onnxruntime makes of it and with its defaults."""
    options = ort.SessionOptions()
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        # two threads on one session's arena are up to a third slower, which would flatter the service
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class but Exception
        raise BenchError(f"onnxruntime {ort.__version__} cannot load `{path}`: {error}") from error
