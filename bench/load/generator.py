"""The load generator: closed loop or open loop, to one target or several at once, on one thread.

In an open loop latency counts from the time a request was *due*: a stall of the service, or of this generator, shows in
every request that it delayed. The generator measures itself too: its CPU time, how late it sent, and how late its own
timer went off.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from bench.load.record import Record
from bench.load.stream import ClosedStream, OpenStream, Stream
from bench.progress import Progress
from bench.target.target import Target

_TICK_S = 0.05  # each costs a wake-up of the process, about 0.1 ms of CPU
_LAST_S = 1.0  # for requests in flight after Ctrl-C
_FIRST_CONNECTIONS = 8  # of an open loop


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to load.

    Attributes:
        seconds: Measured.
        warmup_s: Before that; requests due then are not counted.
        timeout_s: After which a request is given up.
    """

    seconds: float
    warmup_s: float
    timeout_s: float


@dataclass(slots=True)
class Load:
    """All that a run recorded.

    Attributes:
        records: Of each target, all requests, those of the warm-up too.
        start: When the load began, on the clock of `time.perf_counter`.
        measured: From when to when requests count.
        cpu_s: CPU time of this process within that.
        lags: How late the generator's timer went off, in seconds, each time.
        capped: Requests that waited because all connections were busy and no more were allowed.
        connections: Most connections open at once.
        interrupted: Whether Ctrl-C ended it early.
    """

    records: list[list[Record]]
    start: float
    measured: tuple[float, float]
    cpu_s: float = 0.0
    lags: list[float] = field(default_factory=list)
    capped: int = 0
    connections: int = 0
    interrupted: bool = False


def closed(targets: Sequence[Target], connections: int, plan: Plan, *, stop: threading.Event, progress: Progress) -> Load:
    """Loads with a fixed number of connections to each target.

    Args:
        targets: Loaded at the same time.
        connections: Of each target; each has one request in flight.
        plan: How long.
        stop: Set by Ctrl-C: ends early, with what there is.
        progress: Told of the counts.

    Raises:
        BenchError: A target cannot be reached.
    """
    return _run(lambda: [ClosedStream(target, plan.timeout_s) for target in targets], connections, plan, stop, progress)


def open_loop(
    targets: Sequence[Target], arrivals: Sequence[Sequence[float]], most: int, plan: Plan, *, stop: threading.Event, progress: Progress
) -> Load:
    """Loads each target with requests that are due at fixed times.

    Args:
        targets: Loaded at the same time.
        arrivals: Of each target, when requests are due, in seconds from the start of the warm-up.
        most: Connections that a target may have.
        plan: How long.
        stop: Set by Ctrl-C: ends early, with what there is.
        progress: Told of the counts.

    Raises:
        BenchError: A target cannot be reached.
    """

    def streams() -> list[Stream]:
        return [OpenStream(target, plan.timeout_s, times, most) for target, times in zip(targets, arrivals, strict=True)]

    return _run(streams, min(_FIRST_CONNECTIONS, most), plan, stop, progress)


def _run(make: Callable[[], Sequence[Stream]], connections: int, plan: Plan, stop: threading.Event, progress: Progress) -> Load:
    async def run() -> Load:
        return await _Driver(make(), plan, stop, progress).run(connections)

    # nothing here makes cycles, and a collection in the middle would delay what is due
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    finally:
        gc.enable()


class _Driver:
    """Runs streams from the first connection to the last answer."""

    def __init__(self, streams: Sequence[Stream], plan: Plan, stop: threading.Event, progress: Progress) -> None:
        self._streams = streams
        self._plan = plan
        self._stop = stop
        self._progress = progress
        self._lags: list[float] = []

    async def run(self, connections: int) -> Load:
        """Opens the connections, loads, waits for the last answers, and closes."""
        try:
            for stream in self._streams:
                await stream.open(connections)
            return await self._load()
        finally:
            for stream in self._streams:
                stream.close("interrupted" if self._stop.is_set() else "timeout")
            await asyncio.sleep(0.01)  # lets the transports close before the loop does

    async def _load(self) -> Load:
        start = time.perf_counter()
        warm = start + self._plan.warmup_s
        end = warm + self._plan.seconds
        for stream in self._streams:
            stream.begin(start)
        await self._until(warm, start)
        warm, cpu = min(warm, time.perf_counter()), time.process_time()
        await self._until(end, start)
        cpu = time.process_time() - cpu
        end = min(end, time.perf_counter())
        lags, self._lags = self._lags, []
        for stream in self._streams:
            stream.end()
        await self._drain()
        for stream in self._streams:
            stream.close("interrupted" if self._stop.is_set() else "timeout")
        await asyncio.sleep(0.01)  # closing is told by callback
        return Load(
            records=[stream.records for stream in self._streams],
            start=start,
            measured=(warm, end),
            cpu_s=cpu,
            lags=lags,
            capped=sum(stream.capped for stream in self._streams),
            connections=sum(stream.most_connections for stream in self._streams),
            interrupted=self._stop.is_set(),
        )

    async def _until(self, end: float, start: float) -> None:
        while not self._stop.is_set() and (left := end - time.perf_counter()) > 0:
            await self._tick(min(left, _TICK_S), start)

    async def _drain(self) -> None:
        begun = time.perf_counter()
        while any(stream.pending for stream in self._streams):
            if time.perf_counter() - begun > (_LAST_S if self._stop.is_set() else self._plan.timeout_s + _LAST_S):
                return
            await self._tick(_TICK_S, None)

    async def _tick(self, seconds: float, start: float | None) -> None:
        planned = time.perf_counter() + seconds
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        self._lags.append(max(now - planned, 0.0))
        for stream in self._streams:
            stream.give_up(now)
        if start is not None:
            done = sum(len(stream.records) for stream in self._streams)
            failed = sum(stream.failed for stream in self._streams)
            self._progress.update(now - start, self._plan.warmup_s + self._plan.seconds, done, failed)
