"""The raw loop: the speed of a bundle's graph, or of another graph of the same model, in a loop of ONNX Runtime without other work.

Bodies become encodings exactly like in the service, including windows, but before the loop. The loop times `session.run` of single rows
on several threads with one session, whose runs have one thread each. It has no HTTP, queue, batches or decoding. So this is
the speed for a caller with direct access to the session.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from bertserve.bench.target import Body
from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import TRUSTED_LIMITS
from bertserve.service.bundle.files import Bundle, digest, load_bundle
from bertserve.service.bundle.graph_spec import InputSpec
from bertserve.service.engine.onnx_engine import build_feed
from bertserve.service.engine.sessions import session_options
from bertserve.service.errors import BertServeError, StartError
from bertserve.service.tasks.catalog import TASKS, requested_task
from bertserve.service.tasks.step import TaskModel
from bertserve.service.text.tokenizer import Encoding, Tokenizer

WARM_UP_SHARE = 0.1  # relative to the measured time
# inputs of other exporters' graphs, by name -> their content
_STOCK_INPUTS: Mapping[str, Any] = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
# the inputs of one run of the graph by name, each with one row, and its number of texts: a window is a part of a text
RawFeed = tuple[dict[str, NDArray[Any]], float]


class RawLoop:
    """A bundle, and an onnxruntime session with one of its graphs or another one. `description` says which, for the report."""

    def __init__(self, path: Path, graph: Path | None = None, *, served: Mapping[str, Any] | None = None) -> None:
        """Loads the bundle in a folder, and creates a session for `graph`, or for the bundle's graph that is served.

        Raises:
            StartError: The bundle is broken or not the one that is served, or the graph cannot be loaded or has an unknown input.
        """
        self.bundle = load_bundle(path)
        if served is not None and (served.get("version"), served.get("provider")) != (self.bundle.version, "cpu"):
            raise StartError(
                f"the service runs `{served.get('name')}` {served.get('version')} on {served.get('provider')}, but --bundle has "
                f"`{self.bundle.manifest.name}` {self.bundle.version}; give the served bundle, and serve it with --provider cpu."
            )
        spec = self.bundle.graph("cpu", (served or {}).get("precision", "auto"))
        self._graph = graph or path / spec.file
        options = ort.SessionOptions() if graph else session_options(1)  # another graph gets onnxruntime's defaults
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session: Any = ort.InferenceSession(str(self._graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise StartError(f"onnxruntime {ort.__version__} cannot load `{self._graph}`: {error}") from error
        self._inputs = list(spec.inputs)
        if graph:
            inputs = {value.name: value.type.removeprefix("tensor(").removesuffix(")") for value in self._session.get_inputs()}
            if not inputs.keys() <= _STOCK_INPUTS.keys() or not set(inputs.values()) <= {"int64", "int32"}:
                raise StartError(f"`{graph}` has the inputs {inputs}; supported are int64 {', '.join(_STOCK_INPUTS)}.")
            self._inputs = [InputSpec(name=name, fill=_STOCK_INPUTS[name], dtype=dtype) for name, dtype in inputs.items()]
        self.description = {
            "bundle": self.bundle.manifest.name,
            "digest": self.bundle.version,
            "graph": self._graph.name,
            "graph_sha256": digest(graph) if graph else spec.identity,
            "precision": None if graph else spec.precision,
            "onnxruntime": ort.__version__,
        }

    def encode(self, bodies: Sequence[Body]) -> list[RawFeed]:
        """Tokenizes bodies like the service, and returns their feeds.

        Raises:
            StartError: The bundle's model does not support a body.
        """
        feeds: list[RawFeed] = []
        for body, encodings in zip(bodies, encode_bodies(self.bundle, bodies), strict=True):
            texts = body.texts / max(len(encodings), 1)
            feeds += [(build_feed([encoding], self._inputs, (1, len(encoding))), texts) for encoding in encodings]
        return feeds

    def measure(self, feeds: Sequence[RawFeed], *, threads: int, seconds: float, stop: threading.Event) -> float:
        """Runs the feeds repeatedly in order, one row at a time per thread, and returns texts per second.

        There must be at least one feed. A tenth of `seconds` more is run before the measured time. `stop` ends the loop early.

        Raises:
            StartError: A run failed, or none ended in time.
        """
        next_index = itertools.count().__next__
        start = time.perf_counter() + seconds * WARM_UP_SHARE
        end = start + seconds
        finished: list[tuple[float, float]] = []  # texts and the time of their end; appends of several threads are atomic

        def loop(_: int) -> None:
            while not stop.is_set() and time.perf_counter() < end:
                feed, texts = feeds[next_index() % len(feeds)]
                self._session.run(None, feed)
                finished.append((texts, time.perf_counter()))

        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(loop, range(threads)))
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise StartError(f"`{self._graph}` failed on a text of the load: {error}") from error
        total = sum(texts for texts, after in finished if start < after <= end)
        if not total and not stop.is_set():
            raise StartError(f"no run of `{self._graph}` ended within {seconds:g} s; raise --seconds.")
        return total / seconds


def encode_bodies(bundle: Bundle, bodies: Sequence[Body]) -> Iterator[list[Encoding]]:
    """Yields the encodings of each body.

    Raises:
        StartError: The bundle's model does not support a body.
    """
    manifest = bundle.manifest
    model = TaskModel(Tokenizer(bundle.tokenizer_path, manifest.tokenizer), manifest)
    for body in bodies:
        try:
            value = parse_json(body.content)
            task = TASKS[requested_task(manifest.task, value)]
            inputs = validate_as(task.body, value, TRUSTED_LIMITS).task_inputs(manifest)
            yield [encoding for input_ in inputs for encoding in next(task.function(input_, model)).encodings]
        except BertServeError as error:
            raise StartError(f"bundle `{manifest.name}` ({manifest.task}) cannot take a body: {error.message}") from error
