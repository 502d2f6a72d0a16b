"""The load generator: a closed or an open loop on one thread.

In a closed loop, each connection sends its next request when the last one is answered. In an open loop, requests are due at fixed times,
and latency counts from the time when a request was *due*, so a stall of the service or of this generator affects every request that it
delays. The generator also measures the delays of its timer.
"""

import asyncio
import itertools
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import uvloop
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from bertserve.bench.target import Target

_TICK_S = 0.05  # each costs a wake-up of the process, about 0.1 ms of processor time
COUNT_INTERVAL_S = 5.0  # between lines about the progress
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

    Attributes:
        open: Whether it can send another request.
        ended: Time when its last request ended.
        server_timing: Values of the `server-timing` headers of the last response, in lower case and joined by commas.
    """

    def __init__(self) -> None:
        self.open = False
        self.ended = 0.0
        self.server_timing = b""
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._outcome: asyncio.Future[int | str] | None = None  # status or failure of the request in flight

    def request(self, content: bytes) -> asyncio.Future[int | str]:
        """Sends a request over the open connection, and returns its outcome. If that is cancelled, the connection must be closed."""
        assert self._transport is not None, "the connection must be open"
        self.server_timing = b""
        self._outcome = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        return self._outcome

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
        """Parses a part of a response; data without a request closes the connection."""
        if self._outcome is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.abort("malformed")
            return
        if not self.open:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request in flight as `closed`, if there is one; called by the event loop."""
        self.open = False
        self._transport = None
        self._end("closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps the header `server-timing`; called by the parser."""
        if name.lower() == b"server-timing":
            self.server_timing = b", ".join(filter(None, (self.server_timing, value.lower())))

    def on_message_complete(self) -> None:
        """Ends the request at the end of a response that is not an interim one; called by the parser."""
        if (status := self._parser.get_status_code()) >= 200:
            self.open = self._parser.should_keep_alive()
            self._end(status)

    def _end(self, outcome: int | str) -> None:
        if self._outcome is not None and not self._outcome.done():  # it is done if it was cancelled
            self.ended = time.perf_counter()
            self._outcome.set_result(outcome)
        self._outcome = None


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process of `rate` per second, over 0: ascending, in seconds from 0 and below `seconds`.

    The same seed gives the same sequence, scaled for another rate, so the runs of a sweep differ only in their rate.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    gaps = (random_.expovariate(1.0) / rate for _ in itertools.repeat(None))
    return list(itertools.takewhile(lambda time: time < seconds, itertools.accumulate(gaps)))


class Load:
    """Sends the requests of a load, and keeps their records.

    Attributes:
        target: The loaded endpoint.
        records: The records of all requests, including the warm-up.
        measured: Start and end of the measured time, on the clock of `time.perf_counter`.
        timer_lags_s: Delays of the generator's timer.
        cpu_s: Processor time of this process in the measured time.
        capped: Number of requests that waited because the maximum number of connections was busy.
    """

    def __init__(self, target: Target, connections: int, *, seconds: float, warmup_s: float, timeout_s: float) -> None:
        """Describes a load of `seconds`, after a warm-up that is not counted; `send_loads` sends it.

        In a closed loop, each of the connections has one request in flight; in an open loop, it is their maximum number.
        """
        self.target = target
        self.records: list[RequestRecord] = []
        self.measured = (0.0, 0.0)
        self.timer_lags_s: list[float] = []
        self.cpu_s = 0.0
        self.capped = 0
        self._connections, self._seconds, self._warmup_s, self._timeout_s = connections, seconds, warmup_s, timeout_s
        self._ended = False  # no new requests become due
        self._ssl_context = ssl.create_default_context() if target.address.scheme == "https" else None
        self._body_indices = itertools.cycle(range(len(target.requests)))
        self._pool = asyncio.LifoQueue[Connection]()  # the idle connections, and one closed connection for each that can be opened
        for _ in range(connections):
            self._pool.put_nowait(Connection())

    async def send(self, stop: threading.Event, arrivals: Sequence[float] | None) -> None:
        """Sends the load, waits for the last responses, and closes the connections."""
        start = time.perf_counter()
        sending = asyncio.create_task(self._send_in_loops() if arrivals is None else self._send_at(start, arrivals))
        warm = start + self._warmup_s
        end = warm + self._seconds
        await _wait_until(warm, stop)
        measured_from, cpu_start = min(warm, time.perf_counter()), time.process_time()
        self.timer_lags_s = await _wait_until(end, stop)
        self.measured = measured_from, min(end, time.perf_counter())
        self.cpu_s = time.process_time() - cpu_start
        self._ended = True
        await asyncio.wait([sending], timeout=_DRAIN_S if stop.is_set() else self._timeout_s + _DRAIN_S)
        if not sending.cancel():
            sending.result()  # raises its error
        await asyncio.wait([sending])  # requests that still run end here, and get a record
        while not self._pool.empty():
            self._pool.get_nowait().abort()

    async def _send_in_loops(self) -> None:
        """Sends requests on all connections at once; each sends its next request when the last one has ended."""

        async def loop() -> None:
            while not self._ended:
                record = await self._send(time.perf_counter())
                if record.outcome in ("refused", "unreachable"):
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(loop() for _ in range(self._connections)))

    async def _send_at(self, start: float, arrivals: Sequence[float]) -> None:
        """Sends requests at their arrival times, in seconds after `start`, and waits for their ends."""
        async with asyncio.TaskGroup() as requests:
            for arrival in arrivals:
                due = start + arrival
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                if self._ended:
                    break
                # the event loop's timers are up to 1 ms late, so a request that is sent within it was due then
                requests.create_task(self._send(min(time.perf_counter(), due + 0.001)))

    async def _send(self, intended: float) -> RequestRecord:
        """Sends the next request over an idle or a new connection, and records its end."""
        body_index = next(self._body_indices)
        address, loop = self.target.address, asyncio.get_running_loop()
        deadline = loop.time() + intended - time.perf_counter() + self._timeout_s
        outcome: int | str = "interrupted"
        connection, sent, ended = None, None, None
        self.capped += self._pool.empty()
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._pool.get()
                if not connection.open:
                    assert address.hostname and address.port, "`parse_url` returns both"
                    _, connection = await loop.create_connection(Connection, address.hostname, address.port, ssl=self._ssl_context)
                sent = time.perf_counter()
                outcome = await connection.request(self.target.requests[body_index])
                ended = connection.ended
        except TimeoutError:
            outcome = "timeout"
        except OSError as error:
            outcome = "refused" if isinstance(error, ConnectionRefusedError) else "unreachable"
        finally:
            if connection is not None:
                if not isinstance(outcome, int):
                    connection.abort()
                self._pool.put_nowait(connection)
            now = time.perf_counter()
            server_timing = b"" if connection is None else connection.server_timing
            self.records.append(RequestRecord(intended, sent or now, ended or now, outcome, body_index, server_timing))
        return self.records[-1]


def send_loads(
    loads: Sequence[Load],
    stop: threading.Event,
    arrivals: Sequence[Sequence[float]] = (),
    log: Callable[[str], object] = lambda line: None,
) -> None:
    """Sends loads at the same time: in closed loops, or in open loops with the arrival times of each, in seconds from its start.

    If `stop` is set, the loads end early, with the records so far. `log` gets their number every few seconds.
    """

    async def send() -> None:
        sending = asyncio.gather(*(load.send(stop, times) for load, times in itertools.zip_longest(loads, arrivals)))
        while not (await asyncio.wait([sending], timeout=COUNT_INTERVAL_S))[0]:
            log(f"  {sum(len(load.records) for load in loads)} requests ended")
        sending.result()  # raises its error

    uvloop.run(send())


async def _wait_until(end: float, stop: threading.Event) -> list[float]:
    """Waits in short steps until a time or until `stop` is set; returns the delay of each step in seconds."""
    lags_s = []
    while not stop.is_set() and (remaining_s := end - time.perf_counter()) > 0:
        planned = time.perf_counter() + min(remaining_s, _TICK_S)
        await asyncio.sleep(min(remaining_s, _TICK_S))
        lags_s.append(max(time.perf_counter() - planned, 0.0))
    return lags_s
