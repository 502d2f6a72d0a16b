"""ModelEngines: the two engines of a model. One runs each batch on one thread, for throughput; the other uses several threads.

The scheduler decides. A run is multi-threaded if the inference threads suffice for several threads per active, waiting and recent run. A
single caller would otherwise leave all inference threads but one idle. Short runs do not gain, because waking threads costs more than it
saves. The second session needs the memory of the matrices again, so it is created on first use.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import BertServeError

logger = logging.getLogger("bertserve.loading")


@dataclass(slots=True)
class ModelEngines:
    """The engines of a model. The multi-threaded one is created in its own thread on first use, and no run waits for it.

    Attributes:
        single_threaded: The engine whose runs use only the calling inference thread.
        create: Opens the multi-threaded engine of the same graph; None if no text would be faster with it, and after its only call.
        threads: Threads of a multi-threaded run.
        min_tokens: Minimum padded tokens of a run that is faster with several threads.
        model: Name of the model, for the log.
    """

    single_threaded: OnnxEngine
    create: Callable[[], OnnxEngine] | None = None
    threads: int = 1
    min_tokens: int = 0
    model: str = ""
    _multi_threaded: OnnxEngine | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def for_multi_threaded_run(self, tokens: int) -> OnnxEngine:
        """Returns the engine for a multi-threaded run of `tokens` padded tokens; the first call with enough tokens starts to create it."""
        if tokens < self.min_tokens:
            return self.single_threaded
        with self._lock:
            create, self.create = self.create, None
        if create is not None:
            # not a daemon like the calling thread: native code that returns to a finished interpreter aborts the process
            threading.Thread(target=self._create_multi_threaded, args=(create,), name=f"multi-threaded-{self.model}", daemon=False).start()
        return self._multi_threaded or self.single_threaded

    def _create_multi_threaded(self, create: Callable[[], OnnxEngine]) -> None:
        try:
            self._multi_threaded = create()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread; the inference threads do not need its result
            logger.error(
                "all runs of the model %s have one thread, because a session with %d threads could not be created: %s",
                self.model,
                self.threads,
                error.message if isinstance(error, BertServeError) else f"{type(error).__name__}.",
            )


def min_multi_threaded_tokens(cost_model: CostModel, *, nodes: int, longest: int) -> int | None:
    """Returns the minimum length of a text that is faster with several threads, by the cost model's predictions for one thread.

    It is a rule instead of a measurement, because other load during the start would decide for the lifetime of the service.

    It is None if `longest`, the tokens of the longest text, are not enough, or the number of nodes of the graph is unknown (0).
    `cost_model` is fitted to the warm-up and not yet updated.
    """
    if not nodes:
        return None
    # Threads are woken for every node of the graph. With two threads on four of the included models, the speed is 0.9 at 20 us per node on
    # an inference thread, 1.0 at 30, 1.15 to 1.25 at 47, 1.3 at 75, and 1.4 to 1.6 at 170.
    tokens = 1 + bisect_left(range(1, longest + 1), 50e-6 * nodes, key=lambda length: cost_model.predict_seconds(1, length))
    return tokens if tokens <= longest else None
