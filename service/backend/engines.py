"""Engines: the sessions of one graph. One is for the inference threads; the other has more threads, for multi-threaded runs.

A multi-threaded run is one while no other runs or waits. Otherwise each run has one thread, for throughput. A caller who is alone would
leave all inference threads but one without work, so a multi-threaded run of enough tokens takes several cores. Short runs do not gain: waking threads
costs more than they save. The second session costs the memory of the matrices once more, so it is made when a run first wants it.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from bertserve.service.backend.cost import CostModel
from bertserve.service.backend.onnx_engine import Engine
from bertserve.service.errors import BertServeError

logger = logging.getLogger("bertserve.loading")

# More threads save less and less of a run, and the next caller finds all their cores taken.
MAX_MULTI_THREADS = 4
# Seconds on an inference thread, for each node of the graph, from which on threads pay: they are woken for every node. Measured with two threads
# on the four embedded models: 0.9 of the speed at 20 us a node, 1.0 at 30, 1.15 to 1.25 at 47, 1.3 at 75, 1.4 to 1.6 at 170.
MULTI_THREADED_SECONDS_PER_NODE = 5e-5


class MultiThreadedEngine:
    """An engine whose runs take several cores, made in a thread of its own once a run wants it. No run waits for that.

    Attributes:
        threads: Threads of a run.
        min_tokens: Padded tokens of a run from which on it is faster.
    """

    def __init__(self, make: Callable[[], Engine], *, model: str, threads: int, min_tokens: int) -> None:
        """Makes nothing yet.

        Args:
            make: Makes the engine: the same graph as the inference threads run, with more threads. Called once.
            model: Name of the model, for the log.
            threads: Threads of a run.
            min_tokens: Padded tokens of a run from which on it is faster.
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
            # no daemon, as the inference thread that asks is one: native code that comes back to an interpreter that is gone aborts the process
            threading.Thread(target=self._start, args=(make,), name=f"multi-threaded-{self._model}", daemon=False).start()
        return self._engine

    def _start(self, make: Callable[[], Engine]) -> None:
        try:
            self._engine = make()
        except BertServeError as error:
            self._say_why(error.message)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread; what the inference threads do does not need it
            self._say_why(f"{type(error).__name__}.")

    def _say_why(self, reason: str) -> None:
        logger.error(
            "all runs of the model %s have one thread, because a session with %d threads could not be created: %s",
            self._model,
            self.threads,
            reason,
        )


@dataclass(frozen=True, slots=True)
class Engines:
    """What runs a model's batches.

    Attributes:
        single_threaded: With one thread, for all inference threads.
        multi_threaded: With several threads, for multi-threaded runs, where some text is worth it and once there is one.
    """

    single_threaded: Engine
    multi_threaded: MultiThreadedEngine | None = None

    def for_multi_threaded_run(self, tokens: int) -> Engine:
        """Returns what makes a multi-threaded run of so many padded tokens."""
        if self.multi_threaded is None or tokens < self.multi_threaded.min_tokens:
            return self.single_threaded
        return self.multi_threaded.engine() or self.single_threaded


def min_multi_threaded_tokens(cost: CostModel, *, nodes: int, longest: int) -> int | None:
    """Returns the length from which on a text is worth several threads, by what the cost model predicts for an inference thread.

    A rule, and no measurement of the moment: whatever else the machine does while the service starts would decide for its lifetime.

    Args:
        cost: Fitted, and not yet following.
        nodes: Of the graph; 0 where they are not known.
        longest: Tokens of the longest text.

    Returns:
        The length in tokens, or None where no text is worth it, or it is not known.
    """
    if not nodes:
        return None
    tokens = 1 + bisect_left(range(1, longest + 1), MULTI_THREADED_SECONDS_PER_NODE * nodes, key=lambda length: cost.seconds(1, length))
    return tokens if tokens <= longest else None
