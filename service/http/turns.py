"""Turns: large bodies and the lines of streams share the event loop with all other requests. It does not know what a body asks for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the supervisor imports this module before it tells prometheus_client that there are several processes
    from bertserve.service.wire.call import Call, Incoming
    from bertserve.service.wire.routes import Route

# Bytes of large bodies and stream lines that start in one turn of the event loop; they take a few milliseconds.
SMALL_BYTES = 2**12
# A longer body is read on another thread.
LONG_BYTES = 2**16
# A long body that took some time to read is followed by no other one for this many times as long, at most MOST_PAUSE_S. Parsing keeps the GIL
# for up to 25 ms, and a short request needs the GIL several times; so only one of these waits is long.
PAUSES = 3
MOST_PAUSE_S = 0.06
# Seconds until the next turn while bodies or lines wait. Without it they would keep the event loop busy, and other callers would wait three times as
# long: for the loop, for the GIL, and on a machine with few cores for a core.
REST_S = 0.001
# Cost of a line other than the reading of its bytes, expressed in bytes: its task, its admission and its answer.
LINE_BYTES = 2**9


class Turns:
    """Shares the turns of the event loop among the large bodies and the streams of a process, in the order in which they ask.

    Parsing and validating the largest allowed body takes some hundredths of a second, and so do a few hundred short lines. Many of these at the same
    time would block the event loop until the supervisor takes the worker for hung.
    """

    def __init__(self) -> None:
        """Starts with a full turn."""
        self._left = SMALL_BYTES
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._long = asyncio.Lock()
        self._pause_s = 0.0

    async def read(self, route: Route, incoming: Incoming) -> Call:
        """Returns `route.read(incoming)`. Long bodies are read on another thread, one at a time, with pauses between them."""
        if len(incoming.raw) <= LONG_BYTES:
            return route.read(incoming)
        await self._long.acquire()
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_long, route, incoming))
        reading.add_done_callback(self._end_long)
        try:
            return await asyncio.shield(reading)  # a thread continues if its caller is cancelled
        finally:
            del reading  # its error refers to this frame, and such a cycle would keep the body until a garbage collection

    def _end_long(self, reading: asyncio.Future[Call]) -> None:
        if not reading.cancelled():
            reading.exception()  # if its caller was cancelled, asyncio would log it with the caller's text
        asyncio.get_running_loop().call_later(self._pause_s, self._long.release)

    def _read_long(self, route: Route, incoming: Incoming) -> Call:
        start = time.thread_time()
        try:
            return route.read(incoming)
        finally:
            self._pause_s = min(PAUSES * (time.thread_time() - start), MOST_PAUSE_S)

    async def take(self, size: int) -> None:
        """Waits for a turn with bytes left, and takes `size` bytes of it. A larger `size` takes all bytes that are left."""
        if self._left > 0:
            self._spend(size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        await turn

    def _spend(self, size: int) -> None:
        if self._left == SMALL_BYTES:
            loop = asyncio.get_running_loop()
            if self._waiting:
                loop.call_later(REST_S, self._begin_turn)
            else:
                loop.call_soon(self._begin_turn)
        self._left -= max(size, 1)  # so that a turn with something spent is not taken for a full one

    def _begin_turn(self) -> None:
        self._left = SMALL_BYTES
        while self._waiting and self._left > 0:
            size, turn = self._waiting.popleft()
            if not turn.done():  # it is done if its request has ended
                turn.set_result(None)
                self._spend(size)
