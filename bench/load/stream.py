"""The connections to one target and the records of its requests: what to send when, in a closed loop or an open one.

In a closed loop each connection sends its next request when the last one was answered. In an open loop requests are due
at times fixed beforehand, whatever the service does; what waits for a free connection waits here, its clock running.
Every request ends in exactly one record: a status, or the kind of its failure.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from bench.errors import BenchError
from bench.load.connection import Connection
from bench.load.record import OK, Record
from bench.load.timer import PreciseTimer
from bench.target.target import Target

_RETRY_S = 0.1  # before a connection is tried again


class Stream(ABC):
    """The connections and records of one target."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.records: list[Record] = []
        self.capped = 0
        self.failed = 0
        self.connections: set[Connection] = set()
        self.opening = 0
        self.most_connections = 0
        self.ended = False
        self._target = target
        self._requests = target.requests
        self._context: ssl.SSLContext | None = target.address.context
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def begin(self, start: float) -> None:
        """Starts to load."""

    @abstractmethod
    def ready(self, connection: Connection) -> None:
        """Takes a connection that can take a request."""

    @abstractmethod
    def unopened(self, kind: str) -> None:
        """Takes note that a connection could not be opened."""

    @property
    def pending(self) -> bool:
        """Whether a request has no end yet."""
        return any(connection.busy for connection in self.connections)

    @property
    def wanted(self) -> bool:
        """Whether a lost connection is to be replaced."""
        return not self.ended

    def end(self) -> None:
        """Sends no new request."""
        self.ended = True

    async def open(self, count: int) -> None:
        """Opens the first connections.

        Raises:
            BenchError: The target cannot be reached.
        """
        try:
            await asyncio.gather(*(self._connect() for _ in range(count)))
        except OSError as error:
            raise BenchError(self._target.address.unreachable(error)) from error

    def answered(self, connection: Connection, status: int, timing: bytes, now: float) -> None:
        """Records an answer and uses the connection again."""
        self.failed += status != OK
        self.records.append(Record(connection.intended, connection.sent, now, status, connection.item, timing))
        if connection.closing:
            connection.abort("closed")
        else:
            self.ready(connection)

    def lost(self, connection: Connection, kind: str | None) -> None:
        """Records what was in flight and replaces the connection."""
        self.connections.discard(connection)
        if kind is not None:
            self._fail(connection.intended, connection.sent, kind, connection.item)
        if self.wanted:
            self.open_another()

    def give_up(self, now: float) -> None:
        """Ends the requests that took too long."""
        late = now - self._timeout_s
        for connection in [connection for connection in self.connections if connection.busy and connection.sent < late]:
            connection.abort("timeout")

    def close(self, reason: str) -> None:
        """Ends what has not ended, and all connections."""
        self.end()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.abort(reason)

    def open_another(self, delay_s: float = 0.0) -> None:
        """Opens one more connection in the background."""
        task = self._loop.create_task(self._try_connect(delay_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, intended: float, sent: float | None, kind: str, item: int) -> None:
        now = time.perf_counter()
        self.failed += 1
        self.records.append(Record(intended, now if sent is None else sent, now, kind, item, b""))

    async def _connect(self) -> Connection:
        address = self._target.address
        self.opening += 1
        try:
            _, connection = await self._loop.create_connection(lambda: Connection(self), address.host, address.port, ssl=self._context)
        finally:
            self.opening -= 1
        self.connections.add(connection)
        self.most_connections = max(self.most_connections, len(self.connections))
        return connection

    async def _try_connect(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            connection = await asyncio.wait_for(self._connect(), self._timeout_s)
        except OSError as error:
            self.unopened("refused" if isinstance(error, ConnectionRefusedError) else "unreachable")
        else:
            self.ready(connection)


class ClosedStream(Stream):
    """Each connection sends when its last request was answered."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target, timeout_s)
        self._items = itertools.cycle(range(len(target.requests)))

    def begin(self, start: float) -> None:
        """Sends what is due first."""
        for connection in self.connections:
            self.ready(connection)

    def ready(self, connection: Connection) -> None:
        """Sends the next request, if one is due."""
        if not self.ended:
            item = next(self._items)
            now = time.perf_counter()
            connection.send(self._requests[item], item=item, intended=now, now=now)

    def unopened(self, kind: str) -> None:
        """Records the request that the connection was for."""
        if not self.ended:
            now = time.perf_counter()
            self._fail(now, now, kind, next(self._items))
            self.open_another(_RETRY_S)


class OpenStream(Stream):
    """Requests are due at fixed times."""

    def __init__(self, target: Target, timeout_s: float, arrivals: Sequence[float], most: int) -> None:
        super().__init__(target, timeout_s)
        self._arrivals = arrivals
        self._most = most
        self._next = 0
        self._start = 0.0
        self._idle: list[Connection] = []
        self._waiting: deque[tuple[float, int]] = deque()
        self._alarm = PreciseTimer(self._loop, self._due)

    @property
    def pending(self) -> bool:
        """Whether a request has no end yet."""
        return bool(self._waiting) or super().pending

    @property
    def wanted(self) -> bool:
        """Whether a lost connection is to be replaced."""
        return bool(self._waiting) or super().wanted

    def begin(self, start: float) -> None:
        """Sends what is due first."""
        self._start = start
        self._idle = list(self.connections)
        self._due()

    def end(self) -> None:
        """Sends no new request but those that are due."""
        super().end()
        self._alarm.close()

    def ready(self, connection: Connection) -> None:
        """Sends the next request, if one is due."""
        if self._waiting:
            intended, item = self._waiting.popleft()
            connection.send(self._requests[item], item=item, intended=intended, now=time.perf_counter())
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection, kind: str | None) -> None:
        """Forgets a connection."""
        if kind is None and connection in self._idle:
            self._idle.remove(connection)
        super().lost(connection, kind)

    def unopened(self, kind: str) -> None:
        """Records the request that the connection was for."""
        if self._waiting:  # it was opened for the one that waits longest
            intended, item = self._waiting.popleft()
            self._fail(intended, None, kind, item)

    def give_up(self, now: float) -> None:
        """Ends the requests that took too long, those that wait for a connection too."""
        super().give_up(now)
        while self._waiting and self._waiting[0][0] < now - self._timeout_s:
            intended, item = self._waiting.popleft()
            self._fail(intended, None, "timeout", item)

    def close(self, reason: str) -> None:
        """Ends what has not ended, and all connections."""
        super().close(reason)
        for intended, item in self._waiting:
            self._fail(intended, None, reason, item)
        self._waiting.clear()

    def _due(self) -> None:
        """Sends what is due, and sets the alarm for what is due next."""
        if self.ended:
            return
        requests = self._requests
        while self._next < len(self._arrivals):
            now = time.perf_counter()
            due = self._start + self._arrivals[self._next]
            if due > now:
                self._alarm.set(due)
                return
            item = self._next % len(requests)
            self._next += 1
            if self._idle:
                self._idle.pop().send(requests[item], item=item, intended=due, now=now)
                continue
            self._waiting.append((due, item))
            if len(self.connections) + self.opening < self._most:
                self.open_another()
            else:
                self.capped += 1
