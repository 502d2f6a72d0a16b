"""HeldBytes: one limit for the bodies and answers that a process holds in memory for all its connections. It only counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bertserve.service.errors import UnavailableError
from bertserve.service.tasks.cost import MAX_ANSWER_BYTES

# Bodies of the largest size that are held at once, by all workers together.
MAX_BODIES = 16
# Answers of the largest size: the limit is never lower, even if the limit of a body is small.
MAX_ANSWERS = 8
# A worker has room for at least this many bodies or answers of the largest size, however many workers there are. With room for one, it
# would be refused while a smaller one is held.
MIN_LARGEST = 2
# Bodies, answers and unfinished lines of up to so many bytes are not counted and never refused: a connection buffers as much anyway.
UNCOUNTED_BYTES = 2**16
WAIT_S = 30.0  # for room; several streams that each wait for more would otherwise wait for each other


class HeldBytes:
    """Counts the bytes of bodies from when they are read until they are answered, and those of answers until they are sent.

    Attributes:
        limit: Most bytes that are held at once.
        count: Bytes that are held.
    """

    def __init__(self, max_body_bytes: int, workers: int = 1) -> None:
        """Starts with none.

        Args:
            max_body_bytes: Bytes of the largest body.
            workers: Processes that share the limit.
        """
        together = max(MAX_BODIES * max_body_bytes, MAX_ANSWERS * MAX_ANSWER_BYTES)
        self.limit = max(together // workers, MIN_LARGEST * max(max_body_bytes, MAX_ANSWER_BYTES))
        self.count = 0
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether as many bytes are held as may be."""
        return self.count >= self.limit

    def add(self, size: int) -> None:
        """Counts bytes that are held already, whatever the limit; a negative size releases them."""
        self.count += size
        if size < 0:
            self._released.set()

    def reserve(self, size: int) -> None:
        """Counts bytes that are about to be held.

        Raises:
            UnavailableError: They do not fit.
        """
        if self.count + size > self.limit:
            raise UnavailableError("the memory for large requests and answers is full; try again later.")
        self.count += size

    async def reserve_when_free(self, size: int) -> None:
        """Counts bytes that are about to be held, as soon as they fit.

        Raises:
            UnavailableError: They did not fit within `WAIT_S`.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while self.count + size > self.limit:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            self.reserve(size)  # raises, unless they fit now
            return
        self.count += size


@dataclass(slots=True)
class Reservation:
    """What one request holds of `HeldBytes`, until it is released.

    Attributes:
        held: What counts the bytes of all requests.
        size: Bytes.
    """

    held: HeldBytes
    size: int = 0

    def grow(self, size: int) -> None:
        """Reserves so many bytes more.

        Raises:
            UnavailableError: They do not fit.
        """
        self.held.reserve(size)
        self.size += size

    def release(self) -> None:
        """Releases all of it."""
        self.held.add(-self.size)
        self.size = 0
