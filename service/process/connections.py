"""Connections: the open connections of a process, their limits of time and memory, and their end. It does not read bytes.

Once a second all of them are looked at; nothing is armed or measured for a single request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertserve.service.errors import plural

if TYPE_CHECKING:
    from bertserve.service.process.protocol import HttpProtocol
    from bertserve.service.serving.held_bytes import HeldBytes

logger = logging.getLogger("bertserve.connections")

SWEEP_S = 1.0
SOME = 128  # of them are looked at in one turn of the loop, which takes some 0.3 ms
LINGER_S = 0.5  # that a client whose answer was the last has to notice, and one that was just answered to ask again
EXPENDABLE_AFTER_S = 1.0  # a client that came in a burst of others may not have got to its first byte sooner
PROBE_RESERVE = 16
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take.

    Attributes:
        max_connections: Connections that are open at once.
        header_timeout_s: Seconds for the head of a request.
        max_header_bytes: And its bytes.
        body_timeout_s: Seconds for a body, and for a client to take its answers; either may take longer at `min_body_rate`.
        min_body_rate: Bytes a second.
    """

    max_connections: int
    header_timeout_s: float
    max_header_bytes: int
    body_timeout_s: float
    min_body_rate: int


class Room(Enum):
    """What there is for one more connection: a place, one that can only ask probes, or none."""

    PLACE = 1
    PROBE = 2
    NONE = 3


class Connections(set[Any]):
    """The open connections, in place of uvicorn's own set of them.

    Attributes:
        limits: What each may take.
        held_bytes: Where answers count that are not yet sent.
        stopping: Whether the service stops, and refusals are counted.
        closing: Whether the next answer of each is its last.
        refusals: Answers of 503 while the service stopped, but for those to probes, which look for just that.
        changed: Called whenever there are more or fewer.
    """

    def __init__(self, limits: ConnectionLimits, held_bytes: HeldBytes, *, count: Callable[[str], None] = lambda reason: None) -> None:
        """Creates an empty set.

        Args:
            limits: What each may take.
            held_bytes: Where answers count that are not yet sent.
            count: Called with the reason whenever a connection is closed, or its request refused, before it was complete.
        """
        super().__init__()
        self.limits = limits
        self.held_bytes = held_bytes
        self.stopping = False
        self.closing = False
        self.refusals = 0
        self.changed: Callable[[], None] = lambda: None
        self._count = count
        self._ended: Counter[str] = Counter()
        self._surplus: dict[HttpProtocol, None] = {}
        self._expendable: deque[tuple[tuple[bool, float], HttpProtocol]] = deque()
        self._timer: asyncio.Handle | None = None
        self._unparsed: deque[Callable[[], None]] = deque()

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
        self.changed()

    def parse_later(self, parse: Callable[[], None]) -> None:
        """Calls `parse` in a later turn of the loop, after those of other connections: each turn parses for one connection."""
        self._unparsed.append(parse)
        if len(self._unparsed) == 1:
            asyncio.get_running_loop().call_soon(self._parse_next)

    def _parse_next(self) -> None:
        try:
            self._unparsed[0]()
        finally:
            self._unparsed.popleft()
            if self._unparsed:
                asyncio.get_running_loop().call_soon(self._parse_next)

    def start(self) -> None:
        """Looks after the connections from now on: at all of them, and again a second later."""
        self._unchecked = list(self)
        self._waiting: list[tuple[tuple[bool, float], HttpProtocol]] = []
        self._check_some()

    def _check_some(self) -> None:
        """Looks at some, and lets the loop turn before the next: thousands at once would hold it for milliseconds."""
        loop = asyncio.get_running_loop()
        some, self._unchecked = self._unchecked[:SOME], self._unchecked[SOME:]
        if not some:
            self._expendable = deque(sorted(self._waiting, key=lambda each: each[0]))
            self._log()
            self._timer = loop.call_later(SWEEP_S, self.start)
            return
        self._timer = loop.call_soon(self._check_some)  # first, so that an error below ends no more than this turn
        now = loop.time()
        for connection in some:
            if connection in self:
                connection.check(now)
                since = connection.expendable_since
                if since is not None and since[1] <= now - EXPENDABLE_AFTER_S:
                    self._waiting.append((since, connection))

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._log()

    def note(self, reason: str) -> None:
        """Counts an end before a request was complete; the log gets one line for all of a second."""
        self._count(reason)
        self._ended[reason] += 1

    def room(self) -> Room:
        """Returns what there is for one more connection, after making room if none was left."""
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
        """Has each connection end with its next answer."""
        self.closing = True
        for connection in self:
            connection.no_keep_alive()

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Returns an application that counts its refusals here."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def look(message: Message) -> None:
                self.refusals += message.get("status") == _UNAVAILABLE
                await send(message)

            await app(scope, receive, look)

        return counted

    async def end(self, timeout_s: float) -> None:
        """Waits until all are gone: what is being answered continues, and what is idle, or half a request, is closed.

        Args:
            timeout_s: Then the rest, which take their answers too slowly, are cut off.
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
        """Closes the connection that waits longest for its client, idle ones last; false if there is none."""
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
