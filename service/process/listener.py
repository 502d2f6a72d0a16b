"""BalancedListener: how a worker takes connections from the socket that all workers share. Knows sockets and counts, no HTTP.

The kernel alone would deal connections badly. From a shared socket whichever worker wakes first takes nearly all of a
burst: of 8 connections that a client keeps, one worker got 7, and the other's lanes stood still. A socket each
(SO_REUSEPORT) deals by a hash of the addresses: like coins thrown, also to a worker that is busy, and what waits for a
worker that dies is lost. So the workers share one socket, and a worker that has more connections than another leaves the
next one to that other. If the other is busy and has not taken it after a moment, the first one takes it all the same.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import socket
import sys
from collections.abc import Callable, MutableSequence
from typing import cast

logger = logging.getLogger("bertserve.listener")

ABSENT = sys.maxsize  # the count of a worker that takes no connections
BACKLOG = 2048
YIELD_S = 0.001  # that a worker leaves to others; one without work needs a tenth of it
PAUSE_S = 1.0  # when there is no descriptor or memory for another connection
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def shared_counts(count: int, value: int = ABSENT) -> MutableSequence[int]:
    """Returns numbers, such as the connections of each worker, in memory that processes forked from here on share; all have the value."""
    counts = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
    for index in range(count):
        counts[index] = value
    return cast("MutableSequence[int]", counts)


class BalancedListener:
    """Takes connections for one worker."""

    def __init__(self, listener: socket.socket, counts: MutableSequence[int], index: int) -> None:
        """Creates a listener; `start` starts it.

        Args:
            listener: A bound socket.
            counts: From `shared_counts`.
            index: Of this worker.
        """
        self._listener = listener
        self._counts = counts
        self._index = index
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self, on_connection: Callable[[socket.socket], None]) -> None:
        """Listens, and from now on gives each connection that it takes to `on_connection`."""
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self.count(0)
        self._watch()

    def close(self) -> None:
        """Takes what waits, for the last listener to close resets that, and then no more; others need not leave anything to this worker."""
        if self._closed:
            return
        self._unwatch()
        for _ in range(BACKLOG):
            if not self._accept():
                break
        self.leave()

    def leave(self) -> None:
        """Takes no more; what waits, and what comes, is for those who hold the socket too."""
        self._unwatch()
        self._listener.close()
        self.count(ABSENT)
        self._closed = True

    def count(self, connections: int) -> None:
        """Tells the other workers how many connections this one has."""
        if not self._closed:
            self._counts[self._index] = connections

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._on_readable)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener)

    def _on_readable(self) -> None:
        if self._counts[self._index] > min(self._counts):
            self._pause(YIELD_S)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        """Stops watching for a while: a socket that stays readable would wake the loop again and again."""
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._watch()
        self._accept()

    def _accept(self) -> bool:
        """Takes one connection, if nobody else has; the others of a burst are for whoever then has the fewest. False if there was none."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            logger.error("no connection can be taken (%s); trying again in %.0f s", error.strerror, PAUSE_S)
            self._pause(PAUSE_S)
            return False
        connection.setblocking(False)
        self._on_connection(connection)
        return True
