"""A scheduler under test with real threads and a real event loop. The work is a fake that can block or fail."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from bertserve.service.errors import EngineError
from bertserve.service.models.prepare_pool import PreparePool
from bertserve.service.scheduling.records import ScheduledRequest
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.text.tokenizer import INLINE_CHARS
from support import until
from support.fakes import FakeItem, FakeRunner, ManualClock, fake_work


class FakeRun:
    """A run function that returns its payloads, and can block, fail on a payload, or return too few results."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.guilty: set[Any] = set()
        self.short = False

    def __call__(self, payloads: Sequence[Any]) -> list[Any]:
        self.started.release()
        gate = self.gate  # `let_one_pass` replaces the gate
        assert gate.wait(20), "the test never opened the gate"
        self.batches.append(list(payloads))
        if self.guilty & set(payloads):
            raise EngineError(f"guilty: {sorted(self.guilty & set(payloads))}")
        return list(payloads)[1 if self.short else 0 :]

    async def let_one_pass(self) -> None:
        """Ends the run at the gate, and returns when the next run waits at a new gate."""
        before, self.gate = self.gate, threading.Event()
        before.set()
        await asyncio.to_thread(self.started.acquire)


def batch_seconds(rows: int, length: int) -> float:
    return 1e-3 + rows * length * 1e-9


def constant_seconds(seconds: float) -> Callable[[int, int], float]:
    return lambda rows, length: seconds


class Harness:
    """A scheduler under test and its fake work. The scheduler runs within an `async with` block, at whose end every request must have ended."""

    def __init__(self, *, threads: int = 1, manual: bool = False, queue: type[RequestQueue] = RequestQueue, **more: Any) -> None:
        self.work = FakeRun()
        self.runner = FakeRunner(batch_seconds, run=self.work)
        self.clock = ManualClock()
        self.queue = queue(**{"max_queue_tokens": 1000, "threads": threads} | more)
        self.hangs = 0
        self.scheduler = Scheduler(
            self.queue, PreparePool().submit, clock=self.clock if manual else time.monotonic, on_hang=self.count_hang
        )

    async def __aenter__(self) -> Self:
        self.scheduler.start()
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.work.gate.set()
        await self.scheduler.stop(5)
        if error is None:
            assert (self.queue.queue_items, self.queue.total_held_tokens) == (0, 0)

    def count_hang(self) -> None:
        self.hangs += 1

    def runs(self, run: Callable[[Sequence[Any]], Sequence[Any]] | None = None, seconds: Any = batch_seconds, **options: Any) -> FakeRunner:
        """Returns another runner; by default its runs do `work`."""
        return FakeRunner(seconds, run=run or self.work, **options)

    async def run(
        self,
        *payloads: Any,
        tokens: int = 8,
        timeout_s: float = 20.0,
        runner: FakeRunner | None = None,
        finish: Callable[[Sequence[Any]], Any] = list,
        then: Sequence[Any] = (),
        tokenize: Callable[[], Any] | None = None,
        chars: int = INLINE_CHARS + 1,
    ) -> Any:
        """Runs a request with an item per payload, and then one with each of `then`, after a call on a prepare thread with `chars`.

        Returns the result of `finish`.
        """
        answers: list[Any] = []
        rest = list(then)

        def proceed(results: Sequence[Any]) -> list[FakeItem]:
            answers[:] = [finish(results)]
            return [FakeItem(tokens, rest.pop(0))] if rest else []

        def prepare() -> list[FakeItem]:
            if tokenize is not None:
                tokenize()
            return [FakeItem(tokens, payload) for payload in payloads]

        now = self.scheduler.clock()
        work = fake_work(tokens * len(payloads), chars=chars if tokenize else 1, prepare=prepare, proceed=proceed)
        await self.scheduler.handle(ScheduledRequest(runner or self.runner, work, now, now + timeout_s))
        return answers[0]

    def submit(self, *payloads: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.run(*payloads, **options))

    async def until_queued(self, items: int) -> None:
        """Waits until this many items wait."""
        await until(lambda: self.queue.queue_items == items)

    async def block(self) -> asyncio.Task[Any]:
        """Occupies one thread until the gate opens, and returns the task of that request."""
        self.work.started = threading.Semaphore(0)  # discards the starts of earlier runs
        self.work.gate.clear()
        task = self.submit("blocker", runner=self.runs(shares_batches=False))
        await asyncio.to_thread(self.work.started.acquire)
        return task
