"""Compares the service's queue with others in virtual time: `PYTHONPATH=.:tests python tests/serving/queues.py` writes Markdown tables.

Poisson arrivals of short texts (half of the work), documents and lists of 500 texts (a quarter each) with deadlines of five seconds. Runs take
recorded times, which differ from their predictions. All queues get the same arrivals. The earlier queue comes from git. The variants are this
queue without one of its rules.
"""

import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from math import inf, isnan
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bertserve.service.errors import RefusedError
from bertserve.service.scheduling import request_queue
from bertserve.service.scheduling.request_queue import MIN_GAIN, PREDICTION_ERROR
from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest, SizedPayloads
from fakes import FakeRunner
from simulation import TIMEOUT_S, Progress, Simulation, cost_model, recorded_s
from test_heavy_callers import DOCUMENT, LIST, p99

ROOT = Path(__file__).parents[2]
BEFORE = "083f1861"  # the last commit with the earlier queue
PACKAGE = "bertserve.service.scheduling"
MAX_BATCH_TOKENS = 8192
MAX_QUEUE_TOKENS = 10**8  # only deadlines refuse
SAMPLE_S = 0.25  # seconds per thread from one refusal to the next that is checked
KINDS = {"short": 0.5, "document": 0.25, "list": 0.25}  # shares of the work

# Rules of this queue: its name, and the text that is replaced in its source to turn the rule off
RULES = {
    "all items of a request have its arrival as their priority": ("PACE = 1.5", "PACE = 1e-9"),
    "pace 1.0 in place of 1.5": ("PACE = 1.5", "PACE = 1.0"),
    "no turns of short requests after long ones": ("self._owed_s > 0", "False"),
    "short requests are admitted by the work of all requests": ("AHEAD_PER_SHORT = 2.0", "AHEAD_PER_SHORT = 1e9"),
    "a batch-mate of any priority": ("last_priority = head.priority + max((now - head.priority) / 3, OVERTAKEN_S)", "last_priority = inf"),
    "a batch-mate saves any time": ("MIN_GAIN = 1 / 16", "MIN_GAIN = 0.0"),
    "an item of a long request joins short ones as others do": ("delay if favors_long else 0.0", "0.0"),
    "long requests are admitted as if short ones took half of the time": ("both if is_long", "max(both, 2 * (both - short)) if is_long"),
    "a request's own items count with the error of the prediction": (
        "max(PREDICTION_ERROR * wait, wait + own)",
        "PREDICTION_ERROR * (wait + own)",
    ),
    "a batch-mate saves at least 1/32 of the run": ("MIN_GAIN = 1 / 16", "MIN_GAIN = 1 / 32"),
    "a running request joins batches on the last free thread": (
        "if last_thread and item.request.is_long and item.request.is_running and item.request is not request",
        "if False",
    ),
    "no running request joins such batches, even if it is short": (
        "if last_thread and item.request.is_long and item.request.is_running and",
        "if last_thread and item.request.is_running and",
    ),
    "no batches": ("if runner.shares_batches else None", "if False else None"),
}


class Arrival(NamedTuple):
    """A request that arrives."""

    time: float
    kind: str
    lengths: tuple[int, ...]


def arrivals(threads: int, load: float, seconds: float) -> list[Arrival]:
    """Returns random arrivals with `load` times the work that the threads can do, text by text."""
    dice, makers = random.Random(11), {"short": _short, "document": _document, "list": _list}
    made = []
    for kind, share in KINDS.items():
        make = makers[kind]
        mean = sum(recorded_s(1, length) for _ in range(200) for length in make(dice)) / 200
        time = dice.expovariate(share * load * threads / mean)
        while time < seconds:
            made.append(Arrival(time, kind, make(dice)))
            time += dice.expovariate(share * load * threads / mean)
    return sorted(made)


def _short(dice: random.Random) -> tuple[int, ...]:
    return (dice.randint(8, 40),)


def _document(dice: random.Random) -> tuple[int, ...]:
    return (384,) * dice.randint(2, 40)


def _list(dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randint(8, 40) for _ in range(500))


class FirstCome:
    """Serves items in the order of arrival; those that follow join a batch under the same condition as in the service's queue."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._items: deque[Item] = deque()
        self._seconds = 0.0

    def wait_s(self, busy_s: float) -> float:
        return (self._seconds + busy_s) / self._threads

    def check(self, time_left_s: float, busy_s: float) -> None:
        if PREDICTION_ERROR * self.wait_s(busy_s) > time_left_s:
            raise RefusedError("too late", reason="deadline", retry_after_s=1.0)

    def put(self, request: ScheduledRequest, work: SizedPayloads, tokens: int, time_left_s: float, busy_s: float) -> None:
        request.is_open, request.remaining = True, len(work)
        for index, (length, _) in enumerate(work):
            item = Item(request, index, length, None, length, request.runner.seconds(1, length), 0.0)
            self._items.append(item)
            self._seconds += item.seconds

    def take(self, now: float, *, last_thread: bool = False) -> list[Item]:
        batch: list[Item] = []
        while self._items and (not self._items[0].request.is_open or self._joins(batch, self._items[0])):
            item = self._items.popleft()
            self._seconds -= item.seconds
            if item.request.is_open:
                batch.append(item)
        return batch

    def _joins(self, batch: list[Item], item: Item) -> bool:
        if not batch:
            return True
        seconds, rows, length = item.request.runner.seconds, len(batch), max(each.length for each in batch)
        run_s = seconds(rows + 1, max(length, item.length))
        delay = run_s - seconds(rows, length)
        saved = seconds(1, item.length) - delay
        fits = (rows + 1) * max(length, item.length) <= MAX_BATCH_TOKENS
        return fits and saved * len(self._items) > delay * rows and saved >= MIN_GAIN * run_s

    def finish(self, item: Item, result: object) -> bool:
        item.request.remaining -= 1
        return item.request.is_open and not item.request.remaining

    def close(self, request: ScheduledRequest) -> bool:
        was_open, request.is_open = request.is_open, False
        return was_open


class EarlierQueue:
    """The queue of an earlier commit with the interface of this one. Its requests are the owners of its own records."""

    def __init__(self, module: ModuleType, threads: int) -> None:
        self.queue = module.RequestQueue(max_batch_tokens=MAX_BATCH_TOKENS, max_queue_tokens=MAX_QUEUE_TOKENS, threads=threads)
        self.now: Callable[[], float] = lambda: 0.0
        self._earlier: dict[ScheduledRequest, Any] = {}

    def wait_s(self, busy_s: float) -> float:
        wait_s: float = self.queue.wait_s(self.now(), busy_s)
        return wait_s

    def check(self, time_left_s: float, busy_s: float) -> None:
        """It admits only whole requests."""

    def put(self, request: ScheduledRequest, work: SizedPayloads, tokens: int, time_left_s: float, busy_s: float) -> None:
        now, cost = self.now(), request.runner.seconds
        seconds = sum(cost(1, length) for length, _ in work)
        admitted = self.queue.admit(tokens=tokens, seconds=seconds, deadline=now + time_left_s, now=now, busy_s=busy_s, items=len(work))
        admitted.owner = request
        self._earlier[request] = admitted
        if rest := list(self.queue.put(admitted, "model", work, cost, now)):
            self.queue.put_part(admitted, rest, now)

    def take(self, now: float, **options: bool) -> list[Item]:
        return [
            Item(item.request.owner, item.index, item.tokens, item, item.length, item.seconds, item.priority)
            for item in self.queue.take(now, **options)
        ]

    def finish(self, item: Item, result: object) -> bool:
        last: bool = self.queue.finish(item.payload, result)
        return last

    def close(self, request: ScheduledRequest) -> bool:
        closed: bool = self.queue.close(self._earlier[request])
        return closed


class EarlierSimulation(Simulation):
    """With a single thread, the earlier scheduler ran a quick request next to the run of another one, on the same core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queue.now = lambda: self.now
        self._delays: dict[int, float] = {}

    def _start(self) -> None:
        super()._start()
        if self.threads == 1 and len(self._ends) == 1 and not self._delays and (batch := self.queue.take(self.now, quick_only=True)):
            [other] = self._ends
            self.run(batch, slower=2.0)
            self._delays[other] = recorded_s(len(batch), max(item.length for item in batch))

    def _end(self, run: int, batch: Sequence[Item]) -> None:
        if delay := self._delays.pop(run, 0.0):
            self.at(self.now + delay, partial(self._end, run, batch))
        else:
            super()._end(run, batch)


Simulate = Callable[..., Simulation]  # threads -> a simulation with one of the queues


def _module(name: str, source: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def simulated(threads: int, *, queue: Any = None, kind: type[Simulation] = Simulation, **rest: Any) -> Simulation:
    """Returns a simulation with this queue or another one; its predictions learn from runs, as those of the service."""
    cost = cost_model()
    return kind(threads, FakeRunner(cost.seconds), MAX_QUEUE_TOKENS, queue=queue, learns=cost.observe, **rest)


def earlier() -> Simulate:
    """Returns what simulates the queue of the commit `BEFORE`."""
    for name in ("scheduled_request", "request_queue"):
        command = ["git", "-C", str(ROOT), "show", f"{BEFORE}:service/scheduling/{name}.py"]
        source = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        module = _module(f"earlier.{name}", source.replace(PACKAGE, "earlier"))
    return lambda threads, **rest: simulated(threads, queue=EarlierQueue(module, threads), kind=EarlierSimulation, **rest)


def first_come(threads: int) -> Simulation:
    """Simulates a queue in order of arrival."""
    return simulated(threads, queue=FirstCome(threads))


def changed(rule: str) -> Simulate:
    """Returns what simulates this queue with one of its rules changed."""
    source, (old, new) = Path(request_queue.__file__).read_text(encoding="utf-8"), RULES[rule]
    if source.count(old) != 1:
        raise SystemExit(f"the source of the queue does not have this rule once: {rule}")
    make = _module(f"changed: {rule}", source.replace(old, new)).RequestQueue
    options = {"max_batch_tokens": MAX_BATCH_TOKENS, "max_queue_tokens": MAX_QUEUE_TOKENS}
    return lambda threads, **rest: simulated(threads, queue=make(threads=threads, **options), **rest)


class Figures(NamedTuple):
    """By kind of request: milliseconds of half and of 99 % of the answered ones, and the percentage in time; percentage of wrong refusals."""

    p50: dict[str, float]
    p99: dict[str, float]
    in_time: dict[str, float]
    wrong: float | None


def play(simulation: Simulation, load: float) -> Figures:
    """Plays arrivals; counts those between the first deadline, when queues have filled, and the last one."""
    seconds = 20 + 60 / simulation.threads
    requests = arrivals(simulation.threads, load, seconds)
    came: list[tuple[str, Progress | None]] = []
    samples: list[tuple[float, bool]] = [(0.0, False)]

    def come(arrival: Arrival) -> None:
        request = simulation.arrive(*arrival.lengths)
        if TIMEOUT_S <= arrival.time <= seconds - TIMEOUT_S:
            came.append((arrival.kind, request and simulation.admitted[request]))
            if request is None and simulation.now - samples[-1][0] >= SAMPLE_S * simulation.threads:
                samples.append((inf, False))  # the copy takes no samples itself
                samples[-1] = simulation.now, would_be_in_time(simulation, arrival)

    for arrival in requests:
        simulation.at(arrival.time, partial(come, arrival))
    simulation.play()
    p50, p99, in_time = {}, {}, {}
    for kind in KINDS:
        progresses = [progress for each, progress in came if each == kind]
        times = sorted(each.answered_s for each in progresses if each is not None and each.answered_s is not None)
        p50[kind], p99[kind] = (1000 * times[int(share * len(times))] if times else float("nan") for share in (0.5, 0.99))
        in_time[kind] = 100 * len(times) / len(progresses)
    wrong = [is_wrong for _, is_wrong in samples[1:]]
    return Figures(p50, p99, in_time, 100 * sum(wrong) / len(wrong) if wrong else None)


def would_be_in_time(simulation: Simulation, arrival: Arrival) -> bool:
    """Returns whether a refused request would have started before its deadline; a copy of this process plays what would have happened."""
    if process := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code > 1:
            raise SystemExit("the copy of the process failed")
        return code == 1
    try:
        request = simulation.arrive(*arrival.lengths, always=True)
        progress = simulation.admitted[request]
        simulation.play(simulation.now + TIMEOUT_S, stop=lambda: not progress.waiting)
        os._exit(not progress.waiting)
    finally:
        os._exit(2)


def main() -> None:
    """Prints the tables; arguments are numbers of threads, `rules` for the rules of the queue, or none for all."""
    parts = sys.argv[1:] or ["1", "2", "4", "16", "rules"]
    queues = [simulated, earlier(), first_come]
    if parts != ["rules"]:
        print(
            "| threads | load | short p50 | short p99 | documents p50 | documents p99 | in time: short | documents | lists | wrong refusals |"
        )
        print("|" + "---|" * 10)
    for threads, load in product(map(int, filter(str.isdecimal, parts)), (0.5, 0.8, 1.2, 2.0)):
        found = [play(simulate(threads), load) for simulate in queues]
        times = [_cell(getattr(each, name)[kind] for each in found) for kind in ("short", "document") for name in ("p50", "p99")]
        shares = [_cell(each.in_time[kind] for each in found) for kind in KINDS]
        print("|", " | ".join([str(threads), str(load), *times, *shares, _cell(each.wrong for each in found)]), "|", flush=True)
    if "rules" in parts:
        _print_rules([("this queue", simulated), *((rule, changed(rule)) for rule in RULES)])


def _print_rules(variants: Sequence[tuple[str, Simulate]]) -> None:
    print("\n| queue, two threads | load 0.8: p99 | load 2.0: p99 | in time | wrong refusals | ten lists | document | ten documents |")
    print("|" + "---|" * 8)
    variants = [*variants, ("a request can take the last free thread", partial(simulated, leaves_last_thread=False))]
    for name, simulate in variants:
        usual, busy = (play(simulate(2), load) for load in (0.8, 2.0))
        alone = p99(1.0, simulate=simulate)
        ratios = [
            p99(1.0, heavy, callers=callers, simulate=simulate) / alone for heavy, callers in ((LIST, 10), (DOCUMENT, 1), (DOCUMENT, 10))
        ]
        cells = [name, *(_cell(figures.values()) for figures in (usual.p99, busy.p99, busy.in_time)), _cell([busy.wrong])]
        print("|", " | ".join([*cells, *(f"{ratio:.1f}" for ratio in ratios)]), "|", flush=True)


def _cell(values: Iterable[float | None]) -> str:
    return " / ".join("-" if value is None or isnan(value) else f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in values)


if __name__ == "__main__":
    main()
