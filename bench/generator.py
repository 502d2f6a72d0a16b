"""The load generator: a closed or an open loop on one thread.

In a closed loop, each connection sends its next request when the last one is answered. In an open loop, requests are due at fixed times,
and latency counts from the time when a request was *due*, so a stall of the service or of this generator affects every request that it
delays. The generator also measures the delays of its timer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import uvloop
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from bertserve.bench import BenchError
from bertserve.bench.target import Target

_TICK_S = 0.05  # each costs a wake-up of the process, about 0.1 ms of processor time
_DRAIN_S = 1.0  # time for requests in flight after Ctrl-C, and after their timeout


class RequestRecord(NamedTuple):
    """The end of a request. Each request has exactly one. Times are in seconds on the clock of `time.perf_counter`.

    Attributes:
        intended: Time when it was due; in a closed loop, when its connection was free.
        sent: Time when it was sent; if it was never sent, when it ended.
        ended: Time when its response was complete or its failure was known.
        outcome: HTTP status, or the kind of the failure: `timeout`, `closed`, `refused`, `unreachable`, `malformed`, `interrupted`.
        body_index: Index of its body in the target's bodies.
        server_timing: Value of the response's `server-timing` header, empty if there is none.
    """

    intended: float
    sent: float
    ended: float
    outcome: int | str
    body_index: int
    server_timing: bytes = b""


class Connection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 connection with at most one request in flight.

    A request must cost little processor time, which the service under test needs: httptools parses the response, and only the status and
    the header `server-timing` are kept.
    """

    def __init__(self) -> None:
        self.open = False  # whether it can send another request
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._in_flight: tuple[asyncio.Future[RequestRecord], float, float, int] | None = None  # as in `request`
        self._complete = False
        self._server_timing = b""

    def request(self, content: bytes, intended: float, sent: float, body_index: int) -> asyncio.Future[RequestRecord]:
        """Sends a request over the open connection, and returns its record. If that is cancelled, the connection must be closed."""
        assert self._transport is not None, "the connection must be open"
        self._complete = False
        self._server_timing = b""
        record: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
        self._in_flight = record, intended, sent, body_index
        self._transport.write(content)
        return record

    def abort(self, reason: str = "closed") -> None:
        """Closes the connection immediately; the request in flight ends with `reason`."""
        self.open = False
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Makes the connection ready for its first request; called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        """Parses a part of a response, and ends the request after the last one; data without a request closes the connection."""
        if self._in_flight is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.abort("malformed")
            return
        if self._complete:
            self._end(self._parser.get_status_code())
            if not self.open:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request in flight as `closed`, if there is one; called by the event loop."""
        self.open = False
        self._transport = None
        self._end("closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps the header `server-timing` in lower case, and joins several by commas; called by the parser."""
        if name.lower() == b"server-timing":
            self._server_timing = b", ".join(filter(None, (self._server_timing, value.lower())))

    def on_message_complete(self) -> None:
        """Handles the end of a response, but skips interim responses; called by the parser."""
        self._complete = self._parser.get_status_code() >= 200
        self.open = self._parser.should_keep_alive()

    def _end(self, outcome: int | str) -> None:
        if self._in_flight is None:
            return
        record, intended, sent, body_index = self._in_flight
        self._in_flight = None
        if not record.done():  # it is done if it was cancelled
            record.set_result(RequestRecord(intended, sent, time.perf_counter(), outcome, body_index, self._server_timing))


@dataclass(frozen=True, slots=True)
class Durations:
    """The measured time of a load, the time before it that is not counted, and the time after which a request is aborted, in seconds."""

    seconds: float
    warmup_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records of a load, including those of the warm-up.

    Attributes:
        measured: Start and end of the measured time, on the clock of `time.perf_counter`.
        timer_lags_s: Delays of the generator's timer.
        capped: Number of requests that waited because the maximum number of connections was busy.
    """

    records: list[RequestRecord]
    measured: tuple[float, float]
    timer_lags_s: list[float]
    capped: int


def run_load(
    target: Target, durations: Durations, *, connections: int, arrivals: Sequence[float] | None = None, stop: threading.Event
) -> LoadResult:
    """Loads a target in a closed loop, or with arrival times in an open loop. If `stop` is set, the load ends early.

    Args:
        target: Endpoint to load.
        durations: The durations of the load.
        connections: In a closed loop, each has one request in flight; in an open loop, it is their maximum number.
        arrivals: Times when the requests of an open loop are due, in seconds from the start of the warm-up; None for a closed loop.
        stop: Ends the load with the records so far.

    Raises:
        BenchError: The target cannot be reached.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(target, durations, connections, arrivals, stop))


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process of `rate` per second, over 0: ascending, in seconds from 0 and below `seconds`.

    The same seed gives the same sequence, scaled for another rate, so the runs of a sweep differ only in their rate.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    gaps = (random_.expovariate(1.0) / rate for _ in itertools.repeat(None))
    return list(itertools.takewhile(lambda time: time < seconds, itertools.accumulate(gaps)))


async def _run(
    target: Target, durations: Durations, connections: int, arrivals: Sequence[float] | None, stop: threading.Event
) -> LoadResult:
    """Opens the first connections, loads, waits for the last responses, and closes the connections."""
    sender, sending = _Sender(target, durations.timeout_s, connections), None
    try:
        await sender.connect(connections if arrivals is None else 1)
        start = time.perf_counter()
        sending = asyncio.create_task(sender.send_in_loops(connections) if arrivals is None else sender.send_at(start, arrivals))
        warm = start + durations.warmup_s
        await _wait_until(warm, stop)
        measured_from = min(warm, time.perf_counter())
        lags_s = await _wait_until(warm + durations.seconds, stop)
        measured_to = min(warm + durations.seconds, time.perf_counter())
        sender.ended = True
        await asyncio.wait([sending], timeout=_DRAIN_S if stop.is_set() else durations.timeout_s + _DRAIN_S)
        if sending.done():
            sending.result()
    finally:
        # requests that still run end here, and get a record
        if sending is not None:
            sending.cancel()
            await asyncio.wait([sending])
        sender.close()
    return LoadResult(sender.records, (measured_from, measured_to), lags_s, sender.capped)


async def _wait_until(end: float, stop: threading.Event) -> list[float]:
    """Waits in short steps until a time or until `stop` is set; returns the delay of each step in seconds."""
    lags_s = []
    while not stop.is_set() and (remaining_s := end - time.perf_counter()) > 0:
        planned = time.perf_counter() + min(remaining_s, _TICK_S)
        await asyncio.sleep(min(remaining_s, _TICK_S))
        lags_s.append(max(time.perf_counter() - planned, 0.0))
    return lags_s


class _Sender:
    """Sends the requests of a load: its connections and records."""

    def __init__(self, target: Target, timeout_s: float, max_connections: int) -> None:
        self.records: list[RequestRecord] = []
        self.capped = 0
        self.ended = False  # no new requests become due
        self._target = target
        self._timeout_s = timeout_s
        self._ssl_context = ssl.create_default_context() if target.address.tls else None
        self._body_indices = itertools.cycle(range(len(target.requests)))
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(max_connections)

    async def connect(self, count: int) -> None:
        """Opens the first connections.

        Raises:
            BenchError: The target cannot be reached.
        """
        try:
            self._idle = list(await asyncio.gather(*(self._connect() for _ in range(count))))
        except OSError as error:
            raise BenchError(self._target.address.unreachable_message(error)) from error

    async def send_in_loops(self, count: int) -> None:
        """Sends requests in a number of parallel loops, each of which sends one when the last one has ended."""

        async def loop() -> None:
            while not self.ended:
                record = await self._send(time.perf_counter())
                if record.outcome in ("refused", "unreachable"):
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as loops:
            for _ in range(count):
                loops.create_task(loop())

    async def send_at(self, start: float, arrivals: Sequence[float]) -> None:
        """Sends requests at their arrival times, in seconds after `start`, and waits for their ends."""
        async with asyncio.TaskGroup() as requests:
            for arrival in arrivals:
                due = start + arrival
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                if self.ended:
                    break
                # the event loop's timers are up to 1 ms late, so a request that is sent within it was due then
                requests.create_task(self._send(min(time.perf_counter(), due + 0.001)))

    def close(self) -> None:
        """Closes the idle connections; the end of a request closes or returns its own."""
        for connection in self._idle:
            connection.abort()

    async def _send(self, intended: float) -> RequestRecord:
        """Sends the next request over an idle or a new connection, and records its end."""
        body_index = next(self._body_indices)
        sent, record, failure = None, None, "interrupted"
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + intended - time.perf_counter() + self._timeout_s):
                self.capped += self._slots.locked()
                async with self._slots:
                    connection = await self._free_connection()
                    sent = time.perf_counter()
                    try:
                        record = await connection.request(self._target.requests[body_index], intended, sent, body_index)
                    finally:
                        if record is None:
                            connection.abort()
                        self._idle.append(connection)
        except TimeoutError:
            failure = "timeout"
        except OSError as error:
            failure = "refused" if isinstance(error, ConnectionRefusedError) else "unreachable"
        finally:
            now = time.perf_counter()
            record = record or RequestRecord(intended, sent or now, now, failure, body_index)
            self.records.append(record)
        return record

    async def _free_connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        address = self._target.address
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=self._ssl_context)
        return connection
