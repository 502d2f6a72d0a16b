"""Connections: the open connections of a process, with limits on their time and memory, and their shutdown. It reads no bytes.

All connections are checked once per second; a single request needs no timer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertserve.service.errors import plural
from bertserve.service.scheduling.scheduler import GIL_PAUSE_S

if TYPE_CHECKING:
    from bertserve.service.server.parsing import RequestParser
    from bertserve.service.server.protocol import HttpProtocol

logger = logging.getLogger("bertserve.connections")

SWEEP_S = 1.0
# Bytes that are parsed in the turn of the loop in which they are read, of all connections; it takes at most about 2 ms. A read counts at least
# MIN_READ_BYTES, because a request of few bytes takes as long to answer as a longer one.
TURN_BYTES, MIN_READ_BYTES = 2**14, 2**8
# Seconds between two continued connections of clients that do not wait for their answers. Without a pause, such clients keep the event loop busy, and
# others wait three times as long: for the loop, for the GIL, and on a machine with few cores for a core.
EAGER_S = 0.001
GIL_EVERY_S = 2e-3  # minimum seconds between two pauses of GilPauses
SOME = 128  # connections that are checked in one turn of the loop, which takes about 0.3 ms
LINGER_S = 0.5  # time for a client to read its last answer, and for a client with an answer to send its next request
# In a burst of connections, the service may not have read a client's first byte before. It is less than SWEEP_S, so that the second check
# finds a client that does not read.
EXPENDABLE_AFTER_S = 0.9
PROBE_RESERVE = 16
MAX_SCRAPES = PROBE_RESERVE // 2  # of the reserve: a page of metrics takes up to a second, and its client may not read it
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a connection.

    Attributes:
        max_connections: Maximum number of open connections.
        header_timeout_s: Seconds until the head of a request must be complete.
        max_header_bytes: Maximum bytes of a head.
        body_timeout_s: Seconds for a body, and for a client to read its answers; either may take longer at `min_body_rate`.
        min_body_rate: Minimum rate in bytes per second.
    """

    max_connections: int
    header_timeout_s: float
    max_header_bytes: int
    body_timeout_s: float
    min_body_rate: int


class GilPauses:
    """Lets other threads take the GIL while an event loop has more work than fits in a turn.

    System calls and OpenSSL release the GIL for microseconds (`GIL_PAUSE_S`). Without pauses, an inference thread can wait for more than
    0.1 s with TLS, and for 0.02 s without it.
    """

    def __init__(self) -> None:
        """Creates it; the first pause can be at once."""
        self._next = 0.0

    def pause(self) -> None:
        """Blocks the event loop for GIL_PAUSE_S, at most once per GIL_EVERY_S. Call it in a turn after which work remains."""
        if (now := time.monotonic()) >= self._next:
            time.sleep(GIL_PAUSE_S)
            self._next = now + GIL_EVERY_S


class Backlog:
    """Calls functions in order, each in a later turn of the event loop, so that the connections with waiting calls take turns."""

    def __init__(self, interval_s: float = 0.0) -> None:
        """Creates an empty one. `interval_s` is the minimum number of seconds between two calls, and before the first one."""
        self._interval_s = interval_s
        self._calls: deque[Callable[[], None]] = deque()
        self._gil = GilPauses()

    def add(self, call: Callable[[], None]) -> None:
        """Calls `call` in a later turn, after the calls that already wait."""
        self._calls.append(call)
        if len(self._calls) == 1:
            self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(self._interval_s, self._next)

    def _next(self) -> None:
        try:
            self._calls[0]()
        finally:
            self._calls.popleft()
            if self._calls:
                self._gil.pause()
                self._wait()


class Room(Enum):
    """Capacity for another connection: a full one, one that can only send probes, or none."""

    PLACE = 1
    PROBE = 2
    NONE = 3


class Connections(set[Any]):
    """The open connections; it replaces uvicorn's own set of them.

    Attributes:
        limits: The limits of each connection.
        stopping: Whether the service is stopping and counts refusals.
        closing: Whether each connection closes after its next answer.
        refusals: Number of 503 answers while the service was stopping, without probes, which expect them.
        changed: Called whenever a connection is added or removed.
        unparsed: Continues to parse what connections have received.
        short: Starts to parse short requests, which therefore do not wait for the connections in `unparsed`.
        eager: Continues connections whose clients send more before they have an answer, or after the end of what the service needs.
    """

    def __init__(self, limits: ConnectionLimits, *, count: Callable[[str], None] = lambda reason: None) -> None:
        """Creates an empty set.

        Args:
            limits: The limits of each connection.
            count: Called with the reason when a connection is closed, or its request is refused, before the request was complete.
        """
        super().__init__()
        self.limits = limits
        self.stopping = False
        self.closing = False
        self.refusals = 0
        self.changed: Callable[[], None] = lambda: None
        self._count = count
        self._ended: Counter[str] = Counter()
        self._surplus: dict[HttpProtocol, None] = {}
        self._scrapes: set[RequestParser] = set()
        self._expendable: deque[tuple[tuple[bool, float], HttpProtocol]] = deque()
        self._timer: asyncio.Handle | None = None
        self._room = TURN_BYTES
        self.unparsed = Backlog()
        self.short = Backlog()
        self.eager = Backlog(EAGER_S)

    def add(self, connection: HttpProtocol) -> None:
        """Adds a connection."""
        super().add(connection)
        if connection.surplus:
            self._surplus[connection] = None
        self.changed()

    def discard(self, connection: Any) -> None:
        """Removes a connection."""
        super().discard(connection)
        self._surplus.pop(connection, None)
        self._scrapes.discard(connection)
        self.changed()

    def may_scrape(self, connection: RequestParser) -> bool:
        """Returns whether a surplus connection may get the metrics, and counts it as one of them."""
        if len(self._scrapes) >= MAX_SCRAPES:
            return False
        self._scrapes.add(connection)
        return True

    def may_parse(self, size: int) -> bool:
        """Returns whether a connection can parse a read of so many bytes at once, and takes them from the bytes that are left for this turn.

        Other reads are parsed in later turns, and pause reading until then: uvloop reads up to 32 times from a connection in one turn.
        """
        size = max(size, MIN_READ_BYTES)
        if size > self._room:
            return False
        if self._room == TURN_BYTES:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._room -= size
        return True

    def _begin_turn(self) -> None:
        self._room = TURN_BYTES

    def start(self) -> None:
        """Starts to check all connections, once per second."""
        self._unchecked = list(self)
        self._waiting: list[tuple[tuple[bool, float], HttpProtocol]] = []
        self._check_some()

    def _check_some(self) -> None:
        """Checks some connections per turn of the loop, because thousands at once would block it for milliseconds."""
        loop = asyncio.get_running_loop()
        some, self._unchecked = self._unchecked[:SOME], self._unchecked[SOME:]
        if not some:
            self._expendable = deque(sorted(self._waiting, key=lambda pair: pair[0]))
            self._log()
            self._timer = loop.call_later(SWEEP_S, self.start)
            return
        self._timer = loop.call_soon(self._check_some)  # first, so that an error below affects only this turn
        now = loop.time()
        for connection in some:
            if connection in self:
                connection.check(now)
                since = connection.expendable_since
                if since is not None and since[1] <= now - EXPENDABLE_AFTER_S:
                    self._waiting.append((since, connection))

    def stop(self) -> None:
        """Stops the checks."""
        if self._timer is not None:
            self._timer.cancel()
        self._log()

    def note(self, reason: str) -> None:
        """Counts a connection that ended before its request was complete; the log gets one line per second."""
        self._count(reason)
        self._ended[reason] += 1

    def room(self) -> Room:
        """Returns the capacity for another connection; if none is left, it may close another connection first."""
        if len(self) - len(self._surplus) < self.limits.max_connections or self._evict():
            return Room.PLACE
        if len(self) >= self.limits.max_connections + PROBE_RESERVE:
            oldest = next((connection for connection in self._surplus if connection.expendable_since is not None), None)
            if oldest is None:
                self.note("refused")
                return Room.NONE
            oldest.evict()
        return Room.PROBE

    def last_answers(self) -> None:
        """Closes each connection after its next answer."""
        self.closing = True
        for connection in self:
            connection.no_keep_alive()

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Returns an application that counts its refusals in this object."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def look(message: Message) -> None:
                self.refusals += message.get("status") == _UNAVAILABLE
                await send(message)

            await app(scope, receive, look)

        return counted

    async def end(self, timeout_s: float) -> None:
        """Waits until all connections are closed: open requests are answered; connections that are idle or have half a request close.

        Args:
            timeout_s: Seconds after which the remaining connections, whose clients read too slowly, are aborted.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self and (now := loop.time()) < deadline:
            for connection in list(self):
                connection.wind_up(now)
            await asyncio.sleep(0.01)
        for connection in list(self):
            connection.abort()

    def _evict(self) -> bool:
        """Closes the connection that has waited longest for its client, idle ones last; returns false if there is none."""
        while self._expendable:
            since, connection = self._expendable.popleft()
            if connection in self and connection.expendable_since == since:
                connection.evict()
                return True
        return False

    def _log(self) -> None:
        if self._ended:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._ended.most_common())
            logger.warning("%s closed before a request was complete: %s", plural(self._ended.total(), "connection"), reasons)
            self._ended.clear()
