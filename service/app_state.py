"""AppState: the parts of the service that request handlers use."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.service.auth import Authenticator
from bertserve.service.body.task_body import Limits
from bertserve.service.metrics import Metrics
from bertserve.service.models.registry import Registry
from bertserve.service.models.reloader import Reloader
from bertserve.service.monitor import Monitor
from bertserve.service.scheduling.scheduler import Scheduler, State
from bertserve.service.settings import Settings

if TYPE_CHECKING:
    from bertserve.service.tracing import Tracer


@dataclass(frozen=True, slots=True)
class AppState:
    """The parts of the service. `start` and `stop` are called in the event loop of its requests.

    Attributes:
        total_threads: Inference threads of all workers together.
    """

    registry: Registry
    reloader: Reloader
    scheduler: Scheduler
    monitor: Monitor
    metrics: Metrics
    settings: Settings
    provider: str
    limits: Limits
    auth: Authenticator
    worker_index: int
    total_threads: int
    tracer: "Tracer | None"

    def start(self) -> None:
        """Starts the inference threads and the monitor."""
        # A request needs the GIL several times, and with Python's 5e-3 seconds a thread would wait that long each time. With less than
        # 1e-4, threads take the GIL from each other so often that short texts take 4 % longer.
        sys.setswitchinterval(1e-4)
        self.scheduler.start()
        self.monitor.start()

    def withdraw(self) -> None:
        """Makes readiness fail, while requests are still answered."""
        self.scheduler.advance(State.WITHDRAWN)

    async def stop(self, timeout_s: float) -> int:
        """Stops what `start` started, as `Scheduler.stop` does; returns the number of requests that were failed."""
        failed = await self.scheduler.stop(timeout_s)
        self.monitor.stop()
        return failed
