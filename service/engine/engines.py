"""Engines: the sessions of a graph. One is for the inference threads; the other has more threads, for multi-threaded runs.

A run is multi-threaded if no other run is active or waits. Otherwise each run has one thread, for throughput. A single caller would leave
all inference threads but one idle, so a multi-threaded run of enough tokens uses several cores. Short runs do not gain, because waking
threads costs more than it saves. The second session needs the memory of the matrices again, so it is created on first use.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.onnx_engine import Engine
from bertserve.service.errors import BertServeError

logger = logging.getLogger("bertserve.loading")

# More threads save less and less time per run, and the next caller finds all their cores busy.
MAX_MULTI_THREADS = 4
# Minimum seconds on an inference thread, per node of the graph, for threads to pay off, because they are woken for every node. With two
# threads on the four embedded models, the speed is 0.9 at 20 us per node, 1.0 at 30, 1.15 to 1.25 at 47, 1.3 at 75, and 1.4 to 1.6 at 170.
MULTI_THREADED_SECONDS_PER_NODE = 5e-5


class MultiThreadedEngine:
    """An engine whose runs use several cores. It is created in its own thread on the first request, and no run waits for it."""

    def __init__(self, make: Callable[[], Engine], *, model: str, threads: int, min_tokens: int) -> None:
        """Stores the arguments; `engine` creates the engine.

        Args:
            make: Creates the engine: the same graph as on the inference threads, with more threads per run. Called once.
            model: Name of the model, for the log.
            threads: Threads of a run.
            min_tokens: Minimum padded tokens of a run that is faster with several threads.
        """
        self.threads = threads
        self.min_tokens = min_tokens
        self._make: Callable[[], Engine] | None = make
        self._model = model
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def engine(self) -> Engine | None:
        """Returns the engine, or None if it is not created yet or cannot be created. The first call starts to create it."""
        with self._lock:
            make, self._make = self._make, None
        if make is not None:
            # not a daemon like the calling thread: native code that returns to a finished interpreter aborts the process
            threading.Thread(target=self._start, args=(make,), name=f"multi-threaded-{self._model}", daemon=False).start()
        return self._engine

    def _start(self, make: Callable[[], Engine]) -> None:
        try:
            self._engine = make()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread; the inference threads do not need its result
            logger.error(
                "all runs of the model %s have one thread, because a session with %d threads could not be created: %s",
                self._model,
                self.threads,
                error.message if isinstance(error, BertServeError) else f"{type(error).__name__}.",
            )


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a model.

    Attributes:
        single_threaded: Its runs have one thread; all inference threads use it.
        multi_threaded: Its runs have several threads; None if no text would be faster with it.
    """

    single_threaded: Engine
    multi_threaded: MultiThreadedEngine | None = None

    def for_multi_threaded_run(self, tokens: int) -> Engine:
        """Returns the engine for a multi-threaded run of `tokens` padded tokens."""
        if self.multi_threaded is None or tokens < self.multi_threaded.min_tokens:
            return self.single_threaded
        return self.multi_threaded.engine() or self.single_threaded


def min_multi_threaded_tokens(cost: CostModel, *, nodes: int, longest: int) -> int | None:
    """Returns the minimum length of a text that is faster with several threads, by the cost model's predictions for one thread.

    It is a rule instead of a measurement, because other load during the start would decide for the lifetime of the service.

    Args:
        cost: The cost model, fitted to the warm-up and not yet updated.
        nodes: Number of nodes of the graph; 0 if unknown.
        longest: Tokens of the longest text.

    Returns:
        The length in tokens; None if no text is long enough, or `nodes` is unknown.
    """
    if not nodes:
        return None
    tokens = 1 + bisect_left(range(1, longest + 1), MULTI_THREADED_SECONDS_PER_NODE * nodes, key=lambda length: cost.seconds(1, length))
    return tokens if tokens <= longest else None
