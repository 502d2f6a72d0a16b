"""HeldBytes: one limit for the bodies and answers of all connections of a process. It only counts bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bertserve.service.errors import UnavailableError
from bertserve.service.tasks.cost import MAX_ANSWER_BYTES

# Bodies of the maximum size that all workers together can hold.
MAX_BODIES = 16
# Answers of the maximum size; the limit is never lower than these, even if the maximum size of a body is small. Together with the memory
# for decoding (`MAX_MEMORY_TOGETHER`), they leave an eighth of 256 MiB for what is not counted.
MAX_ANSWERS = 6
# Each worker can hold at least this many bodies or answers of the maximum size, however many workers there are. If it could hold
# only one, it would refuse one while it holds a smaller one.
MIN_LARGEST = 2
# Bodies, answers and unfinished lines up to this size are not counted and never refused: a connection buffers as much anyway.
UNCOUNTED_BYTES = 2**16
WAIT_S = 30.0  # limit of the wait for free bytes; otherwise several streams that need more could wait for each other forever


class HeldBytes:
    """Counts the bytes of a body from its reading until its request is answered, and the bytes of an answer until it is sent.

    It is used only on the event loop.
    """

    def __init__(self, max_body_bytes: int, workers: int = 1) -> None:
        """Starts with no bytes; `workers` is the number of processes that share the limit."""
        together = max(MAX_BODIES * max_body_bytes, MAX_ANSWERS * MAX_ANSWER_BYTES)
        self.limit = max(together // workers, MIN_LARGEST * max(max_body_bytes, MAX_ANSWER_BYTES))
        self.count = 0
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.count >= self.limit

    def add(self, size: int) -> None:
        """Counts bytes that are already in memory, even above the limit; a negative size releases bytes."""
        self.count += size
        if size < 0:
            self._released.set()

    def reserve(self, size: int) -> None:
        """Reserves bytes.

        Raises:
            UnavailableError: The limit would be exceeded.
        """
        if self.count + size > self.limit:
            raise UnavailableError("the memory for large requests and answers is full; try again later.")
        self.count += size

    async def reserve_when_free(self, size: int) -> None:
        """Reserves bytes as soon as the limit allows it.

        Raises:
            UnavailableError: The limit did not allow it within `WAIT_S`.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while self.count + size > self.limit:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            self.reserve(size)  # raises, unless the limit allows them now
            return
        self.count += size


@dataclass(slots=True)
class ByteReservation:
    """The bytes that one request has reserved in `HeldBytes`."""

    held: HeldBytes
    size: int = 0

    def grow(self, size: int) -> None:
        """Reserves further bytes.

        Raises:
            UnavailableError: The limit would be exceeded.
        """
        self.held.reserve(size)
        self.size += size

    def replace(self, size: int) -> None:
        """Counts other bytes in place of the reserved ones, even above the limit, because they are already in memory."""
        self.held.add(size - self.size)
        self.size = size

    def release(self) -> None:
        """Releases all bytes."""
        self.held.add(-self.size)
        self.size = 0
