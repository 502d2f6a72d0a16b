"""JSON Lines: a body of many bodies, one a line, is answered line by line, in order, each as soon as it and those before it are done.

A stream may be longer than any memory. What is read of it and not yet answered, and the answers that are not yet sent, are bounded by a
number of lines and by bytes; while there is that much nothing more is taken from the connection, so that TCP holds the sender back. A
client that does not read its answers holds its own stream back in the same way. Knows no models: a function answers a line.

All streams of a process hold their bytes together with other requests (`HeldBytes`). A line over 64 KiB is read on once there is room for the
longest one; while there is none left, each stream has one line under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from bertserve.service.errors import ClientGoneError
from bertserve.service.serving.held_bytes import UNCOUNTED_BYTES, HeldBytes

MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE, "application/jsonl", "application/jsonlines", "application/x-jsonlines"})
UNANSWERED = "bertserve.unanswered"  # scope key: lines of a stream that were read and are not answered; while there are some, the client need not send
GONE = "bertserve.gone"  # scope key: an event of a stream, which the protocol sets once the connection is lost

Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]


_BLANK_LINES = re.compile(rb"\n{2,}")


def is_stream(content_type: bytes) -> bool:
    """Returns whether a body of this type is one of many lines."""
    return content_type.partition(b";")[0].strip().lower().decode("latin-1") in MEDIA_TYPES


class LineCutter:
    """Cuts what comes in chunks into lines.

    Attributes:
        size: Bytes that are kept of the line that has begun.
    """

    def __init__(self, max_bytes: int) -> None:
        """Creates it; of a line over `max_bytes` it keeps one byte more, and drops the rest."""
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the lines that a chunk ends, without those that are empty or blank."""
        # a chunk of nothing but line ends would be hundreds of thousands of lines
        first, *rest = _BLANK_LINES.sub(b"\n", chunk).split(b"\n")
        self._keep(first)
        if not rest:
            return []
        lines = [self.end()]
        lines += [line[: self._max_bytes + 1] for line in rest[:-1]]
        self._keep(rest[-1])
        return [line for line in lines if line and not line.isspace()]

    def end(self) -> bytes:
        """Returns the line that has begun, and begins another one."""
        line, self._parts, self.size = b"".join(self._parts), [], 0
        return line

    def _keep(self, piece: bytes) -> None:
        if room := self._max_bytes + 1 - self.size:
            self._parts.append(piece[:room])
            self.size += len(self._parts[-1])


class LineStream:
    """Answers the lines of one request."""

    def __init__(self, scope: Scope, receive: Receive, answer: Answer, *, max_jobs: int, max_bytes: int, held: HeldBytes) -> None:
        """Creates it.

        Args:
            scope: The request's.
            receive: Its ASGI channel.
            answer: Returns the answer to a line, which may be an error, without a newline.
            max_jobs: Lines that are read and whose answer is not yet sent.
            max_bytes: Bytes of one line, and of all these lines together with their answers, where they are several. An answer that is not
                yet there counts as many as the last one had.
            held: Where these bytes count too.
        """
        self._scope = scope
        self._receive = receive
        self._answer = answer
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._held = held
        self._reserved = 0  # bytes of the line that is being read, if it is long
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._jobs: asyncio.Queue[tuple[asyncio.Task[bytes], int] | None] = asyncio.Queue()
        self._count = self._bytes = 0
        self._answer_bytes = 0  # of the last answer
        self._freed = asyncio.Event()
        self._running: set[asyncio.Task[bytes]] = set()

    async def __call__(self, send: Send) -> None:
        """Answers all lines. Nothing is sent before the first of them, so that what fails until then has a status of its own.

        Raises:
            ClientGoneError: The client hung up; the jobs of its lines were given up.
        """
        self._scope[UNANSWERED] = 0
        self._scope[GONE] = gone = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(work) for work in (self._read(), self._start(), self._watch(gone))]
                await self._write(send)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for job in self._running:
                job.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._held.add(-self._bytes - self._reserved)

    async def _read(self) -> None:
        """Takes a chunk ahead of the one that is being cut, and watches for the client to hang up."""
        more = True
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _client_gone()
            if not more:
                continue
            if message.get("body"):
                await self._chunks.put(message["body"])
            if not (more := message.get("more_body", False)):
                await self._chunks.put(None)

    async def _watch(self, gone: asyncio.Event) -> None:
        """Waits for the connection to be lost: while a chunk waits to be cut, nothing asks the channel for it."""
        await gone.wait()
        raise _client_gone()

    async def _start(self) -> None:
        """Starts a job for each line as long as there is room."""
        cutter = LineCutter(self._max_bytes)
        while (chunk := await self._chunks.get()) is not None:
            for line in cutter.feed(chunk):
                await self._start_line(line)
            if cutter.size <= UNCOUNTED_BYTES:
                await self._reserve(0)
            elif cutter.size > self._reserved:
                await self._reserve(min(2 * cutter.size, self._max_bytes))
        if (last := cutter.end()) and not last.isspace():
            await self._start_line(last)
        self._jobs.put_nowait(None)

    async def _reserve(self, size: int) -> None:
        """Reserves bytes for the line that is being read, in place of those that were reserved before; waits until there is room."""
        if size > self._reserved:
            await self._held.reserve_when_free(size - self._reserved)
        elif size < self._reserved:
            self._held.add(size - self._reserved)
        self._reserved = size

    async def _start_line(self, line: bytes) -> None:
        while self._count >= self._max_jobs or (self._count and (self._exceeded_by(line) or self._held.full)):
            self._freed.clear()
            await self._freed.wait()
        expected = self._answer_bytes
        job = asyncio.create_task(self._answer_held(line, expected))
        self._running.add(job)
        self._hold(1, len(line) + expected)
        self._jobs.put_nowait((job, len(line)))

    def _exceeded_by(self, line: bytes) -> bool:
        """Returns whether the bytes under way would be too many with another line and its answer."""
        return self._bytes + len(line) + self._answer_bytes > self._max_bytes

    async def _answer_held(self, line: bytes, expected: int) -> bytes:
        """Answers a line, and corrects the number of bytes that its answer counts."""
        answer = await self._answer(line)
        self._answer_bytes = len(answer)
        self._hold(0, len(answer) - expected)
        return answer

    async def _write(self, send: Send) -> None:
        """Sends the answers in the order of their lines; what is sent slowly is held, and with it what is read."""
        headers = [(b"content-type", MEDIA_TYPE.encode())]
        start: Message | None = {"type": "http.response.start", "status": 200, "headers": headers}
        while (item := await self._jobs.get()) is not None:
            job, size = item
            answer = await job
            if start is not None:
                await send(start)
                start = None
            await send({"type": "http.response.body", "body": answer + b"\n", "more_body": True})
            self._running.discard(job)
            self._hold(-1, -size - len(answer))
        if start is not None:
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _hold(self, jobs: int, size: int) -> None:
        self._count += jobs
        self._bytes += size
        self._held.add(size)
        self._scope[UNANSWERED] = self._count
        self._freed.set()


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection before its stream was answered.")
