"""CudaGraphSession: a session that replays small runs as CUDA graphs.

A small run takes 1.5 ms whatever its size, because its kernels start one by one. A captured run starts them together: it takes 0.5 to 0.8
ms with identical outputs (bench/results/2026-11-27-gpu.md). Its shapes, buffers and thread are fixed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.engine.sessions import new_tensor, run_options

logger = logging.getLogger("bertserve.loading")

# Identifies a captured run: the names of its outputs, and the shapes of its inputs.
Key = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]

# Maximum padded tokens of a captured run: larger ones keep the GPU busy while their kernels start.
MAX_TOKENS = 4096
# Maximum captured runs of a thread, and bytes of the outputs of each: with the inputs, their buffers take at most 150 MiB per thread and
# model.
MAX_RUNS, MAX_OUTPUT_BYTES = 128, 2**20

# While ONNX Runtime captures a run, CUDA refuses to allocate memory in all threads of the process, and the attempt ruins the capture. So
# each run holds a permit, and a capture holds all of them. Their number is the maximum of `--threads`.
_PERMITS = 256
# Maximum seconds that a capture waits for a permit: a run that hangs keeps its own, and runs that wait for the capture must not hang too.
MAX_WAIT_S = 2.0
_run_permits = threading.Semaphore(_PERMITS)
_capture_lock = threading.Lock()


class CudaGraphSession:
    """A session that all threads share, and for each thread that captures runs a session of its own.

    ONNX Runtime keeps captured runs per session and thread, and other runs of the session use the same memory. Each thread therefore has
    its own copy of the weights on the GPU. It captures runs only in a block of `capturing`; they are freed with this object.
    """

    def __init__(self, session: Any, open_session: Callable[[], Any] | None, device: tuple[str, int]) -> None:
        """Takes the shared session, how to open the others (None to capture no runs), and the name and index of their device."""
        self._session = session
        self._open = open_session
        self._device = device
        self._thread = _ThreadState()
        self._ids = count(1)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures the small runs of the calling thread in this block."""
        self._thread.captures = True
        try:
            yield
        finally:
            self._thread.captures = False

    def run(self, names: Sequence[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a run, like `InferenceSession.run`."""
        thread, key = self._thread, (tuple(names), tuple(array.shape for array in feed.values()))
        if thread.captures and key not in thread.runs and len(thread.runs) < MAX_RUNS:
            self._capture(thread, key, names, feed)
        with _run_permits:
            captured = thread.runs.get(key)
            outputs: list[NDArray[Any]] = self._session.run(names, feed) if captured is None else captured.run(feed)
            return outputs

    def _capture(self, thread: _ThreadState, key: Key, names: Sequence[str], feed: dict[str, NDArray[Any]]) -> None:
        """Captures a run if it is small. After a failure, such as too little memory or a node on the CPU, nothing more is captured."""
        if max(array.size for array in feed.values()) > MAX_TOKENS:
            return
        with _capture_lock:
            if self._open is None:
                return
            try:
                with _run_permits:
                    thread.session = thread.session or self._open()
                    outputs = thread.session.run(names, feed, run_options(-1))  # -1: this run is not captured; cuDNN builds its plans in it
                    if sum(output.nbytes for output in outputs) > MAX_OUTPUT_BYTES:
                        return
                    captured = _CapturedRun(thread.session, feed, dict(zip(names, outputs, strict=True)), next(self._ids), self._device)
                with _exclusive():
                    captured.run(feed)
                thread.runs[key] = captured
            except Exception as error:  # noqa: BLE001 - onnxruntime's pybind exceptions share no base class but Exception
                self._open, thread.session, thread.runs = None, None, {}
                logger.warning("small runs are not captured as CUDA graphs: %s", error)


class _ThreadState(threading.local):
    """The state of a thread: its session, its captured runs by their keys, and whether it captures runs now."""

    def __init__(self) -> None:
        self.session: Any = None
        self.runs: dict[Key, _CapturedRun] = {}
        self.captures = False


class _CapturedRun:
    """A run with fixed buffers for inputs and outputs. The first call of `run` captures it, the others replay it."""

    def __init__(
        self, session: Any, feed: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]], graph_id: int, device: tuple[str, int]
    ) -> None:
        """Takes inputs and outputs for their shapes and types; `graph_id` is unique for the session."""
        self._session = session
        self._options = run_options(graph_id)
        self._binding = session.io_binding()
        self._inputs = {name: new_tensor(array, device) for name, array in feed.items()}
        self._outputs = [new_tensor(array, device) for array in outputs.values()]
        for name, tensor in self._inputs.items():
            self._binding.bind_ortvalue_input(name, tensor)
        for name, tensor in zip(outputs, self._outputs, strict=True):
            self._binding.bind_ortvalue_output(name, tensor)

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns copies of the outputs."""
        for name, array in feed.items():
            self._inputs[name].update_inplace(array)
        self._session.run_with_iobinding(self._binding, self._options)
        return [np.array(tensor.numpy()) for tensor in self._outputs]


@contextmanager
def _exclusive() -> Iterator[None]:
    """Waits until no other run is active, and keeps others waiting.

    Raises:
        TimeoutError: A run takes too long.
    """
    permits = 0
    try:
        while permits < _PERMITS:
            if not _run_permits.acquire(timeout=MAX_WAIT_S):
                raise TimeoutError(f"another run has taken {MAX_WAIT_S:g} s.")
            permits += 1
        yield
    finally:
        if permits:
            _run_permits.release(permits)
