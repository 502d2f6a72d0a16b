"""OnnxEngine: one graph in one ONNX Runtime session; pads, runs, un-pads. Knows tensors, not texts, tasks or queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from service.bundle import GraphSpec, OutputSpec, Provider
from service.errors import EngineError, ProviderError
from service.tokenization import Encoding

try:
    import onnxruntime as ort
except ImportError as error:  # both wheels share this import name, so neither is in the base install
    raise ProviderError(
        "ONNX Runtime is not installed: `pip install 'bertserve[cpu]'`, or `'bertserve[gpu]'` on a machine with an NVIDIA GPU."
    ) from error

ORT_PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
VERSION: str = ort.__version__

Row = dict[str, NDArray[np.float32]]


class Engine(Protocol):
    """What a model needs of an engine; small, so that a fake is ten lines."""

    def run(self, encodings: Sequence[Encoding]) -> list[Row]:
        """Returns one row of outputs per encoding, in order."""
        ...


class OnnxEngine:
    """One graph in one session, shared by all lanes: `run` is thread-safe and releases the GIL while it computes."""

    def __init__(self, path: Path, graph: GraphSpec, *, pad_id: int, padding_side: Literal["left", "right"], threads: int = 1) -> None:
        """Creates the session.

        Args:
            path: The ONNX file.
            graph: Its entry in the manifest.
            pad_id: Token id of the padding.
            padding_side: Where padding goes.
            threads: Threads of one run. Lanes give the parallelism, so 1 on a CPU.

        Raises:
            ProviderError: This onnxruntime lacks the graph's provider, or the session did not get it.
        """
        wanted = ORT_PROVIDERS[graph.provider]
        if wanted not in ort.get_available_providers():
            raise ProviderError(
                f"`{path}` needs {wanted}, which this onnxruntime {VERSION} lacks (it has "
                f"{', '.join(ort.get_available_providers())}); install 'bertserve[gpu]', or choose another --provider."
            )
        if graph.provider != "cpu":
            ort.preload_dlls()  # CUDA and cuDNN from their wheels, where the system has none
        try:
            self._session = ort.InferenceSession(str(path), _session_options(threads), providers=[wanted])
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise ProviderError(f"onnxruntime {VERSION} cannot load `{path}`: {error}") from error
        if wanted not in self._session.get_providers():
            raise ProviderError(f"`{path}` asked for {wanted}, but the session got {self._session.get_providers()} only.")
        self._inputs = graph.inputs
        self._outputs = graph.outputs
        self._names = [output.name for output in graph.outputs]
        self._pad = {"token_ids": pad_id, "attention_mask": 0, "type_ids": 0}
        self._left = padding_side == "left"

    def run(self, encodings: Sequence[Encoding]) -> list[Row]:
        """Runs one batch, padded to its longest text.

        Args:
            encodings: At least one.

        Returns:
            For each encoding its outputs by name, float32, without padding: of a `per_text` output [values], of a `per_token`
            one [length, ...], of a `per_mask` one [masks, values].

        Raises:
            EngineError: The graph failed, or an output has a wrong number of rows or is not finite.
        """
        try:
            outputs = self._session.run(self._names, self._feed(encodings))
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise EngineError(f"the graph failed with {type(error).__name__}.") from error
        rows: list[Row] = [{} for _ in encodings]
        for spec, output in zip(self._outputs, outputs, strict=True):
            if not np.isfinite(output).all():
                raise EngineError(f"output `{spec.name}` is not finite; this graph cannot score this text.")
            for row, part in zip(rows, self._split(spec, output, encodings), strict=True):
                row[spec.name] = part
        return rows

    def _split(self, spec: OutputSpec, output: NDArray[np.float32], encodings: Sequence[Encoding]) -> list[NDArray[np.float32]]:
        """Returns each encoding's part of an output, without padding."""
        expected = sum(len(encoding.masks) for encoding in encodings) if spec.kind == "per_mask" else len(encodings)
        if len(output) != expected:
            raise EngineError(f"output `{spec.name}` has {len(output)} rows where {expected} belong. This is a bug.")
        if spec.kind == "per_text":
            return list(output)
        if spec.kind == "per_token":
            longest = output.shape[1]
            return [row[self._place(encoding, longest)] for row, encoding in zip(output, encodings, strict=True)]
        ends = np.cumsum([len(encoding.masks) for encoding in encodings])
        return np.split(output, ends[:-1])

    def _place(self, encoding: Encoding, longest: int) -> slice:
        """Returns where an encoding's tokens stand in a row padded to `longest`."""
        return slice(longest - len(encoding), longest) if self._left else slice(0, len(encoding))

    def time_runs(self, shapes: Sequence[tuple[int, int]], *, repeats: int) -> list[tuple[int, int, float]]:
        """Warms up on dummy batches and times them, for the cost model.

        Args:
            shapes: `(rows, length)` of each batch.
            repeats: Timed runs of each after one that is not; the fastest counts.

        Returns:
            `(rows, length, seconds)` for each shape.
        """
        timed = []
        for rows, length in shapes:
            zeros = np.zeros(length, dtype=np.int64)
            batch = [Encoding(zeros, zeros, masks=(1,))] * rows
            self.run(batch)
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                self.run(batch)
                seconds.append(time.perf_counter() - start)
            timed.append((rows, length, min(seconds)))
        return timed

    def _feed(self, encodings: Sequence[Encoding]) -> dict[str, NDArray[np.int64]]:
        """Returns the padded inputs by name, each as its InputSpec says."""
        longest = max(map(len, encodings))
        feed = {}
        for spec in self._inputs:
            if spec.fill == "mask_index":
                feed[spec.name] = np.array(
                    [i * longest + self._place(e, longest).start + mask for i, e in enumerate(encodings) for mask in e.masks],
                    dtype=np.int64,
                )
                continue
            padded = feed[spec.name] = np.full((len(encodings), longest), self._pad[spec.fill], dtype=np.int64)
            for row, encoding in zip(padded, encodings, strict=True):
                row[self._place(encoding, longest)] = {"token_ids": encoding.ids, "attention_mask": 1, "type_ids": encoding.type_ids}[
                    spec.fill
                ]
        return feed


def available_provider() -> Provider:
    """Returns the provider that `auto` means: CUDA where this onnxruntime has it, else the CPU."""
    return "cuda" if ORT_PROVIDERS["cuda"] in ort.get_available_providers() else "cpu"


def _session_options(threads: int) -> Any:
    options = ort.SessionOptions()
    # The default takes every core of the host and spins between runs.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Lanes share a session, and its arena hands them buffers from all over: over minutes up to a third slower than malloc, which keeps
    # a heap for each thread and gives back what was just used, still in the cache.
    options.enable_cpu_mem_arena = False
    # The pattern cache keeps memory for every shape ever seen, and lengths vary without end.
    options.enable_mem_pattern = False
    # The exporter chose the operators by measurement; the extended level would fuse some of them into slower ones.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return options
