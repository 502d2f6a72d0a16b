"""The connections and records of a target, which decide when each request is sent in a closed or an open loop.

In a closed loop, each connection sends its next request when the last one is answered. In an open loop, requests are due at fixed
times, independent of the service. A request without a free connection waits here, and its latency counts.
Every request ends with exactly one record: a status, or the kind of its failure.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bertserve.bench.errors import BenchError
from bertserve.bench.load.connection import Connection, PreciseTimer
from bertserve.bench.target import Target

OK = 200


class RequestRecord(NamedTuple):
    """The end of a request. Times are in seconds on the clock of `time.perf_counter`.

    Attributes:
        intended: Time when it was due; in a closed loop, when it was sent.
        sent: Time when it was sent; if it was never sent, when it ended.
        ended: Time when its response was complete or its failure was known.
        outcome: HTTP status, or the kind of the failure: `timeout`, `closed`, `refused`, `unreachable`, `malformed`, `interrupted`.
        body_index: Index of its body in the target's bodies.
        server_timing: Value of the response's `server-timing` header, empty if there is none.
        retry_after: Whether the response has a time for a retry.
    """

    intended: float
    sent: float
    ended: float
    outcome: int | str
    body_index: int
    server_timing: bytes
    retry_after: bool = False


_RECONNECT_DELAY_S = 0.1


class TargetStream(ABC):
    """The connections and records of one target.

    Attributes:
        records: The requests that have ended.
        failed: Number of them with another outcome than 200.
        capped: Number of requests that waited because the target had its maximum number of connections.
        connections: Number of open connections.
        connecting: Number of connections that are being opened.
        peak_connections: Maximum number of open connections.
        ended: Whether no new requests become due.
    """

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.records: list[RequestRecord] = []
        self.failed = 0
        self.capped = 0
        self.connections: set[Connection] = set()
        self.connecting = 0
        self.peak_connections = 0
        self.ended = False
        self._closed = False
        self._target = target
        self._requests = target.requests
        self._ssl_context: ssl.SSLContext | None = target.address.ssl_context
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def start(self, now: float) -> None:
        """Starts sending requests.

        Args:
            now: Start of the arrival times, on the clock of `time.perf_counter`.
        """

    @abstractmethod
    def on_connection_free(self, connection: Connection) -> None:
        """Uses a connection without a request in flight."""

    @abstractmethod
    def on_connect_failed(self, kind: str) -> None:
        """Records that a connection could not be opened."""

    @property
    def pending(self) -> bool:
        """Whether there are requests that have not ended."""
        return any(connection.busy for connection in self.connections)

    @property
    def replaces_connections(self) -> bool:
        """Whether a lost connection is replaced."""
        return not self.ended

    def end(self) -> None:
        """Stops new requests from becoming due."""
        self.ended = True

    async def connect(self, count: int) -> None:
        """Opens the first connections.

        Raises:
            BenchError: The target cannot be reached.
        """
        try:
            await asyncio.gather(*(self._connect() for _ in range(count)))
        except OSError as error:
            raise BenchError(self._target.address.unreachable_message(error)) from error

    def on_response(self, connection: Connection, status: int, server_timing: bytes, now: float) -> None:
        """Records a response, and uses the connection again."""
        self.failed += status != OK
        self.records.append(
            RequestRecord(connection.intended, connection.sent, now, status, connection.body_index, server_timing, connection.retry_after)
        )
        if connection.closing:
            connection.abort("closed")
        else:
            self.on_connection_free(connection)

    def on_connection_lost(self, connection: Connection, kind: str | None) -> None:
        """Records the request in flight, if any, and replaces the connection."""
        self.connections.discard(connection)
        if kind is not None:
            self._record_failure(connection.intended, connection.sent, kind, connection.body_index)
        if self.replaces_connections:
            self.connect_in_background()

    def abort_overdue(self, now: float) -> None:
        """Ends the requests that exceed the timeout."""
        limit = now - self._timeout_s
        for connection in [connection for connection in self.connections if connection.busy and connection.sent < limit]:
            connection.abort("timeout")

    def close(self, reason: str) -> None:
        """Closes all connections, and ends all requests with `reason`."""
        self.end()
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.abort(reason)

    def connect_in_background(self, delay_s: float = 0.0) -> None:
        """Opens another connection in a separate task."""
        task = self._loop.create_task(self._try_connect(delay_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record_failure(self, intended: float, sent: float | None, kind: str, body_index: int) -> None:
        now = time.perf_counter()
        self.failed += 1
        self.records.append(RequestRecord(intended, now if sent is None else sent, now, kind, body_index, b""))

    async def _connect(self) -> Connection:
        address = self._target.address
        self.connecting += 1
        try:
            _, connection = await self._loop.create_connection(lambda: Connection(self), address.host, address.port, ssl=self._ssl_context)
        finally:
            self.connecting -= 1
        self.connections.add(connection)
        self.peak_connections = max(self.peak_connections, len(self.connections))
        if self._closed:  # a connection can still be made after its task was cancelled
            connection.abort("closed")
        return connection

    async def _try_connect(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            connection = await asyncio.wait_for(self._connect(), self._timeout_s)
        except OSError as error:
            self.on_connect_failed("refused" if isinstance(error, ConnectionRefusedError) else "unreachable")
        else:
            self.on_connection_free(connection)


class ClosedLoopStream(TargetStream):
    """Each connection sends its next request when the last one is answered."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target, timeout_s)
        self._body_indices = itertools.cycle(range(len(target.requests)))

    def start(self, now: float) -> None:
        """Sends the first request of each connection."""
        for connection in self.connections:
            self.on_connection_free(connection)

    def on_connection_free(self, connection: Connection) -> None:
        """Sends the next request, unless the load has ended."""
        if not self.ended:
            body_index = next(self._body_indices)
            now = time.perf_counter()
            connection.send(self._requests[body_index], body_index=body_index, intended=now, now=now)

    def on_connect_failed(self, kind: str) -> None:
        """Records the request that the connection would have sent, and tries again."""
        if not self.ended:
            now = time.perf_counter()
            self._record_failure(now, now, kind, next(self._body_indices))
            self.connect_in_background(_RECONNECT_DELAY_S)


class OpenLoopStream(TargetStream):
    """Requests are due at fixed times."""

    def __init__(self, target: Target, timeout_s: float, arrivals: Sequence[float], max_connections: int) -> None:
        super().__init__(target, timeout_s)
        self._arrivals = arrivals
        self._max_connections = max_connections
        self._next_arrival = 0
        self._start = 0.0
        self._idle: list[Connection] = []
        self._waiting: deque[tuple[float, int]] = deque()  # (time when it was due, index of its body)
        self._timer = PreciseTimer(self._loop, self._send_due)

    @property
    def pending(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._waiting) or super().pending

    @property
    def replaces_connections(self) -> bool:
        """Whether a lost connection is replaced."""
        return bool(self._waiting) or super().replaces_connections

    def start(self, now: float) -> None:
        """Sends the first request when it is due."""
        self._start = now
        self._idle = list(self.connections)
        self._send_due()

    def end(self) -> None:
        """Stops new requests from becoming due; requests that wait for a connection are still sent."""
        super().end()
        self._timer.close()

    def on_connection_free(self, connection: Connection) -> None:
        """Sends the request that has waited longest, if any."""
        if self._waiting:
            intended, body_index = self._waiting.popleft()
            connection.send(self._requests[body_index], body_index=body_index, intended=intended, now=time.perf_counter())
        else:
            self._idle.append(connection)

    def on_connection_lost(self, connection: Connection, kind: str | None) -> None:
        """Removes a connection, including idle ones."""
        if kind is None and connection in self._idle:
            self._idle.remove(connection)
        super().on_connection_lost(connection, kind)

    def on_connect_failed(self, kind: str) -> None:
        """Records the request that has waited longest, for which the connection was opened."""
        if self._waiting:
            intended, body_index = self._waiting.popleft()
            self._record_failure(intended, None, kind, body_index)

    def abort_overdue(self, now: float) -> None:
        """Ends the requests that exceed the timeout, including requests that wait for a connection."""
        super().abort_overdue(now)
        while self._waiting and self._waiting[0][0] < now - self._timeout_s:
            intended, body_index = self._waiting.popleft()
            self._record_failure(intended, None, "timeout", body_index)

    def close(self, reason: str) -> None:
        """Closes all connections, and ends all requests, including requests that wait for a connection."""
        super().close(reason)
        for intended, body_index in self._waiting:
            self._record_failure(intended, None, reason, body_index)
        self._waiting.clear()

    def _send_due(self) -> None:
        """Sends the requests that are due, and sets the timer for the next one."""
        if self.ended:
            return
        requests = self._requests
        while self._next_arrival < len(self._arrivals):
            now = time.perf_counter()
            due = self._start + self._arrivals[self._next_arrival]
            if due > now:
                self._timer.set(due)
                return
            body_index = self._next_arrival % len(requests)
            self._next_arrival += 1
            if self._idle:
                self._idle.pop().send(requests[body_index], body_index=body_index, intended=due, now=now)
                continue
            self._waiting.append((due, body_index))
            if len(self.connections) + self.connecting < self._max_connections:
                self.connect_in_background()
            else:
                self.capped += 1
