"""The load generator: a closed or an open loop to one or more targets at once, on one thread.

In an open loop, latency counts from the time when a request was *due*, so a stall of the service or of this generator affects every
request that it delays. The generator also measures itself: its CPU time, and the delays of its requests and of its timer.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from bertserve.bench.load.stream import ClosedLoopStream, OpenLoopStream, RequestRecord, TargetStream
from bertserve.bench.progress import BenchProgress
from bertserve.bench.target import Target

_TICK_S = 0.05  # each costs a wake-up of the process, about 0.1 ms of CPU
_DRAIN_S = 1.0  # time for requests in flight after Ctrl-C
_TRANSPORT_CLOSE_S = 0.01  # time for the transports' callbacks after they close
_INITIAL_CONNECTIONS = 8  # of an open loop, per target


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of a load, in seconds.

    Attributes:
        seconds: Measured time.
        warmup_s: Time before it; requests that are due then are not counted.
        timeout_s: Time after which a request is aborted.
    """

    seconds: float
    warmup_s: float
    timeout_s: float


@dataclass(slots=True)
class LoadResult:
    """The records of a load.

    Attributes:
        records: All requests of each target, including those of the warm-up.
        start: Time when the load began, on the clock of `time.perf_counter`.
        measured: Start and end of the measured time, on the same clock.
        cpu_s: CPU time of this process within the measured time.
        timer_lags_s: Delays of the generator's timer.
        capped: Number of requests that waited because the maximum number of connections was busy.
        peak_connections: Maximum number of open connections.
        interrupted: Whether Ctrl-C ended the load early.
    """

    records: list[list[RequestRecord]]
    start: float
    measured: tuple[float, float]
    cpu_s: float = 0.0
    timer_lags_s: list[float] = field(default_factory=list)
    capped: int = 0
    peak_connections: int = 0
    interrupted: bool = False


def run_closed_loop(
    targets: Sequence[Target], connections: int, durations: Durations, *, stop: threading.Event, progress: BenchProgress
) -> LoadResult:
    """Loads all targets at the same time, each over a fixed number of connections with one request in flight.

    If `stop` is set, the load ends early with the records so far.

    Raises:
        BenchError: A target cannot be reached.
    """
    return _run(lambda: [ClosedLoopStream(target, durations.timeout_s) for target in targets], connections, durations, stop, progress)


def run_open_loop(
    targets: Sequence[Target],
    arrivals: Sequence[Sequence[float]],
    max_connections: int,
    durations: Durations,
    *,
    stop: threading.Event,
    progress: BenchProgress,
) -> LoadResult:
    """Loads all targets at the same time, each with requests at fixed times, in seconds from the start of the warm-up.

    If `stop` is set, the load ends early with the records so far.

    Raises:
        BenchError: A target cannot be reached.
    """
    pairs = list(zip(targets, arrivals, strict=True))
    return _run(
        lambda: [OpenLoopStream(target, durations.timeout_s, times, max_connections) for target, times in pairs],
        min(_INITIAL_CONNECTIONS, max_connections),
        durations,
        stop,
        progress,
    )


def _run(
    make_streams: Callable[[], Sequence[TargetStream]],
    connections: int,
    durations: Durations,
    stop: threading.Event,
    progress: BenchProgress,
) -> LoadResult:
    async def run() -> LoadResult:
        return await _LoadRun(make_streams(), durations, stop, progress).run(connections)

    # the load creates no reference cycles, and a collection would delay requests
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    finally:
        gc.enable()


class _LoadRun:
    """One load over its streams, from the first connection to the last response."""

    def __init__(self, streams: Sequence[TargetStream], durations: Durations, stop: threading.Event, progress: BenchProgress) -> None:
        self._streams = streams
        self._durations = durations
        self._stop = stop
        self._progress = progress
        self._timer_lags_s: list[float] = []

    async def run(self, connections: int) -> LoadResult:
        """Opens the connections, loads, waits for the last responses and closes."""
        try:
            for stream in self._streams:
                await stream.connect(connections)
            return await self._load()
        finally:
            # the result shares the streams' records, so it includes the requests that end here
            for stream in self._streams:
                stream.close("interrupted" if self._stop.is_set() else "timeout")
            await asyncio.sleep(_TRANSPORT_CLOSE_S)

    async def _load(self) -> LoadResult:
        start = time.perf_counter()
        warm = start + self._durations.warmup_s
        end = warm + self._durations.seconds
        for stream in self._streams:
            stream.start(start)
        await self._wait_until(warm, start)
        warm, cpu = min(warm, time.perf_counter()), time.process_time()
        await self._wait_until(end, start)
        cpu = time.process_time() - cpu
        end = min(end, time.perf_counter())
        lags, self._timer_lags_s = self._timer_lags_s, []
        for stream in self._streams:
            stream.end()
        await self._drain()
        return LoadResult(
            records=[stream.records for stream in self._streams],
            start=start,
            measured=(warm, end),
            cpu_s=cpu,
            timer_lags_s=lags,
            capped=sum(stream.capped for stream in self._streams),
            peak_connections=sum(stream.peak_connections for stream in self._streams),
            interrupted=self._stop.is_set(),
        )

    async def _wait_until(self, end: float, start: float) -> None:
        while not self._stop.is_set() and (remaining_s := end - time.perf_counter()) > 0:
            await self._tick(min(remaining_s, _TICK_S), start)

    async def _drain(self) -> None:
        start = time.perf_counter()
        while any(stream.pending for stream in self._streams):
            if time.perf_counter() - start > (_DRAIN_S if self._stop.is_set() else self._durations.timeout_s + _DRAIN_S):
                return
            await self._tick(_TICK_S, None)

    async def _tick(self, seconds: float, start: float | None) -> None:
        """Sleeps, records the delay of the timer, aborts overdue requests, and reports progress if `start` is set."""
        planned = time.perf_counter() + seconds
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        self._timer_lags_s.append(max(now - planned, 0.0))
        for stream in self._streams:
            stream.abort_overdue(now)
        if start is not None:
            finished = sum(len(stream.records) for stream in self._streams)
            failed = sum(stream.failed for stream in self._streams)
            self._progress.update(now - start, self._durations.warmup_s + self._durations.seconds, finished, failed)


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process of `rate` per second, over 0: ascending, in seconds from 0 and below `seconds`.

    The same seed gives the same sequence, scaled for another rate, so the runs of a sweep differ only in their rate.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    times = []
    now = random_.expovariate(1.0) / rate
    while now < seconds:
        times.append(now)
        now += random_.expovariate(1.0) / rate
    return times
