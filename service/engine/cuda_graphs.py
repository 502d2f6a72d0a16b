"""CudaGraphSession: a session that replays small runs as CUDA graphs.

A small run takes 1.5 ms whatever its size, because its kernels start one by one. A captured run starts them together: it takes 0.5 to 0.8
ms with identical outputs (bench/results/2026-11-27-gpu.md). Its shapes, buffers and thread are fixed.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.engine.sessions import new_tensor, run_options

logger = logging.getLogger("bertserve.loading")

# Identifies a captured run: the names of its outputs, and the shapes of its inputs.
Key = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
Arrays = dict[str, NDArray[Any]]  # name of an input or output -> its array

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


class CudaGraphSession(threading.local):
    """A session that all threads share, and for each thread that captures runs a session of its own; the attributes differ by thread.

    ONNX Runtime keeps captured runs per session and thread, and other runs of the session use the same memory. Each thread therefore has
    its own copy of the weights on the GPU. It captures runs only in a block of `capturing`; they are freed with this object.
    """

    def __init__(self, session: Any, open_session: Callable[[], Any] | None, device: tuple[str, int]) -> None:
        """Wraps the shared session; `open_session` opens the others (None: no run is captured), on the device of this name and index.

        Python calls this again in each other thread that uses the object.
        """
        self._session = session
        self._open = open_session
        self._device = device
        self._own_session: Any = None
        self._runs: dict[Key, Callable[[Arrays], list[NDArray[Any]]]] = {}
        self._captures = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures the small runs of the calling thread in this block."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def run(self, names: Sequence[str], feed: Arrays) -> list[NDArray[Any]]:
        """Returns the outputs of a run, like `InferenceSession.run`."""
        key = tuple(names), tuple(array.shape for array in feed.values())
        if self._captures and key not in self._runs and len(self._runs) < MAX_RUNS:
            self._capture(key, names, feed)
        with _run_permits:
            replay = self._runs.get(key)
            return self._session.run(names, feed) if replay is None else replay(feed)

    def _capture(self, key: Key, names: Sequence[str], feed: Arrays) -> None:
        """Captures a run if it is small. After a failure, such as too little memory or a node on the CPU, the thread captures no more."""
        if self._open is None or max(array.size for array in feed.values()) > MAX_TOKENS:
            return
        with _capture_lock:
            try:
                with _run_permits:
                    self._own_session = self._own_session or self._open()
                    outputs = self._own_session.run(names, feed, run_options(-1))  # -1: not captured; cuDNN builds its plans in this run
                    if sum(output.nbytes for output in outputs) > MAX_OUTPUT_BYTES:
                        return
                    named = dict(zip(names, outputs, strict=True))
                    replay = _bind(self._own_session, feed, named, graph_id=len(self._runs) + 1, device=self._device)
                with _exclusive():
                    replay(feed)
                self._runs[key] = replay
            except Exception as error:  # noqa: BLE001 - onnxruntime's pybind exceptions share no base class but Exception
                self._open, self._own_session, self._runs = None, None, {}
                logger.warning("small runs of a thread are not captured as CUDA graphs: %s", error)


def _bind(session: Any, feed: Arrays, outputs: Arrays, *, graph_id: int, device: tuple[str, int]) -> Callable[[Arrays], list[NDArray[Any]]]:
    """Returns a function that runs with fixed buffers and returns copies of the outputs; its first call captures the run.

    `feed` and `outputs` give the shapes and types of the buffers, and `graph_id` is unique for the session.
    """
    options, binding = run_options(graph_id), session.io_binding()
    input_tensors = {name: new_tensor(array, device) for name, array in feed.items()}
    output_tensors = {name: new_tensor(array, device) for name, array in outputs.items()}
    for name, tensor in input_tensors.items():
        binding.bind_ortvalue_input(name, tensor)
    for name, tensor in output_tensors.items():
        binding.bind_ortvalue_output(name, tensor)

    def replay(feed: Arrays) -> list[NDArray[Any]]:
        for name, array in feed.items():
            input_tensors[name].update_inplace(array)
        session.run_with_iobinding(binding, options)
        return [np.array(tensor.numpy()) for tensor in output_tensors.values()]

    return replay


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
