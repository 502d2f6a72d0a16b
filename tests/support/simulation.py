"""Simulation: a request queue whose inference threads run in virtual time, with run times that were recorded on a CPU."""

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bertserve.service.bundle.manifest import Flops
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.errors import RefusedError
from bertserve.service.scheduling.records import Batch, ScheduledRequest
from bertserve.service.scheduling.request_queue import RequestQueue
from support.fakes import FakeItem, FakeRunner, fake_work

# Processor seconds of a text by its tokens: the model `sentiment` (6 layers, hidden size 384, int8) on one thread of an AMD EPYC (Zen 4).
RECORDED_S = {
    1: 0.0009,
    8: 0.00121,
    16: 0.00132,
    23: 0.00149,
    32: 0.00169,
    64: 0.00299,
    128: 0.00676,
    256: 0.0166,
    384: 0.0315,
    512: 0.0466,
}
_LENGTHS = list(RECORDED_S)


_COST = CostModel(Flops(linear=21233664, quadratic=9216), [(1, length, seconds) for length, seconds in RECORDED_S.items()])
predicted_s = _COST.predict_seconds

TIMEOUT_S = 5.0


def recorded_s(rows: int, length: int) -> float:
    """Returns the seconds of a run; between the recorded lengths it interpolates. Texts that share a run share its fixed cost."""
    place = max(bisect_left(_LENGTHS, length), 1)
    below, above = _LENGTHS[place - 1], _LENGTHS[place]
    text_s = RECORDED_S[below] + (RECORDED_S[above] - RECORDED_S[below]) * (length - below) / (above - below)
    return text_s + (rows - 1) * (text_s - _COST.fixed_s)


@dataclass(slots=True)
class Progress:
    """The course of an admitted request, in seconds after its arrival.

    Attributes:
        predicted_s: The prediction at its arrival for the start of its first item.
        waiting: Items that have not started.
        first_s: Start of its first item.
        answered_s: The end.
    """

    predicted_s: float
    waiting: int
    first_s: float | None = None
    answered_s: float | None = None


@dataclass
class Simulation:
    """Inference threads in virtual time. Long requests leave one to short ones, as in the scheduler while short requests come.

    Attributes:
        threads: Number of inference threads.
        runner: Predicts runs; real ones take the recorded times, times `slower`, with random noise.
        max_queue_tokens: The queue's limit.
        seed: Seed of the random arrivals.
        progress: The admitted requests.
        refusals: `Retry-After` seconds of the refused requests.
        on_end: Called with each request that is answered or expires.
    """

    threads: int
    runner: FakeRunner = field(default_factory=lambda: FakeRunner(predicted_s, max_batch_tokens=8192))
    max_queue_tokens: int = 10**6
    seed: int = 7
    slower: float = 1.0
    now: float = 0.0
    progress: dict[ScheduledRequest, Progress] = field(default_factory=dict)
    refusals: list[float] = field(default_factory=list)
    on_end: Callable[[ScheduledRequest], None] = lambda request: None

    def __post_init__(self) -> None:
        self.queue = RequestQueue(max_queue_tokens=self.max_queue_tokens, threads=self.threads)
        self.random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time, self._event_count, action))

    def arrive(self, *lengths: int) -> ScheduledRequest | None:
        """Admits a request whose texts have these numbers of tokens, or returns None."""
        request = ScheduledRequest(self.runner, fake_work(sum(lengths)), self.now, self.now + TIMEOUT_S)
        wait = self.queue.wait_s(self.now)
        try:
            self.queue.open(request, self.now)
            self.queue.put(request, [FakeItem(length) for length in lengths], self.now)
        except RefusedError as error:
            self.queue.close(request)
            self.refusals.append(error.retry_after_s)
            return None
        self.progress[request] = Progress(wait, len(lengths))
        self.at(request.deadline, partial(self._expire, request))
        self._start()
        return request

    def play(self, until: float = float("inf")) -> None:
        """Plays events until a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, until) if until < float("inf") else self.now

    def _expire(self, request: ScheduledRequest) -> None:
        if self.progress[request].waiting and self.queue.close(request):
            self.on_end(request)

    def _start(self) -> None:
        while len(self.queue.batches) < self.threads and (batch := self.queue.start_batch(self.now)):
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        for item in batch.items:
            progress, seconds = self.progress[item.request], self.now - item.request.arrived
            progress.waiting -= 1
            progress.first_s = seconds if progress.first_s is None else progress.first_s
        seconds = recorded_s(len(batch.items), max(item.length for item in batch.items))
        self.at(self.now + seconds * self.slower * self.random.lognormvariate(0, 0.1), partial(self._end, batch))

    def _end(self, batch: Batch) -> None:
        self.queue.batches.remove(batch)
        for item in batch.items:
            if self.queue.finish(item, None) and self.queue.close(item.request):
                self.progress[item.request].answered_s = self.now - item.request.arrived
                self.on_end(item.request)
        self._start()
