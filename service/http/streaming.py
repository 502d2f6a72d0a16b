"""JSON Lines: each line of the body is a request. The answers are sent line by line, in order, each as soon as it is ready.

A stream can be larger than the memory. A number of lines and a number of bytes limit the lines that are read and not yet answered, and
the answers that are not yet sent. At the limit, nothing more is read from the connection, so that TCP slows the sender down. A client
that does not read its answers slows its own stream in the same way. This module knows no models: a function answers a line.

The bytes of all streams of a process and of its other requests share one limit (`HeldBytes`). A line over 64 KiB is read further only
when the bytes of the longest allowed line can be reserved. If the last answer was over 64 KiB, a line starts only when as many bytes can
be reserved, and an answer that is larger than expected is an error if the memory is full. While the limit is reached, each stream
processes one line at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from bertserve.service.errors import BertServeError, ClientGoneError, RefusedError, TooLargeError, UnauthorizedError, UnavailableError
from bertserve.service.http import errors
from bertserve.service.http.auth import AUTH, CALLER
from bertserve.service.http.errors import GONE, UNANSWERED
from bertserve.service.http.middleware import ERROR_LOG, REQUEST_ID, of_request, recorded_trace
from bertserve.service.http.responses import content_of, send_body, send_pieces
from bertserve.service.http.turns import LINE_BYTES, SMALL_BYTES, Turns
from bertserve.service.metrics import UNKNOWN
from bertserve.service.scheduling.scheduled_request import SHARE_FULL, Share
from bertserve.service.serving.build import AppState
from bertserve.service.serving.held_bytes import UNCOUNTED_BYTES, ByteReservation, HeldBytes
from bertserve.service.serving.work import Prediction
from bertserve.service.tracing.trace import Trace
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.routes import Route

# Bytes of a stream that take as long to cut into lines, at most, as one byte of a line takes to be read.
CUT_BYTES = 2
MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})

# a line, and the bytes that are already counted for its answer -> its answer
Answer = Callable[[bytes, int], Coroutine[Any, Any, list[bytes]]]


class LineCutter:
    """Cuts a sequence of chunks into lines; `size` is the number of stored bytes of the unfinished line."""

    def __init__(self, max_bytes: int) -> None:
        """Creates it; it stores at most `max_bytes` + 1 bytes of a line, and drops the rest."""
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the lines that end in a chunk, without empty and blank lines."""
        first, *rest = chunk.split(b"\n")
        self._keep(first)
        if not rest:
            return []
        lines = [self.end()]
        lines += [line[: self._max_bytes + 1] for line in rest[:-1]]
        self._keep(rest[-1])
        return [line for line in lines if line and not line.isspace()]

    def end(self) -> bytes:
        """Returns the unfinished line, and starts another one."""
        line, self._parts, self.size = b"".join(self._parts), [], 0
        return line

    def _keep(self, piece: bytes) -> None:
        if room := self._max_bytes + 1 - self.size:
            self._parts.append(piece[:room])
            self.size += len(self._parts[-1])


class LineStream:
    """Answers the lines of one request."""

    def __init__(
        self, scope: Scope, receive: Receive, answer: Answer, *, max_requests: int, max_bytes: int, held: HeldBytes, turns: Turns
    ) -> None:
        """Creates it.

        Args:
            scope: The request's scope.
            receive: The request's ASGI channel.
            answer: Returns the pieces of the answer to a line, or of an error, without a newline. The stream changes the list.
            max_requests: Maximum number of lines that are read and whose answer is not yet sent.
            max_bytes: Maximum bytes of a line, and of all these lines together with their answers unless there is only one. An answer that
                is not yet ready counts as many bytes as the last answer had.
            held: The limit on these bytes for the whole process.
            turns: The turns in which it starts lines, and cancels started ones.
        """
        self._scope = scope
        self._receive = receive
        self._answer = answer
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._held = held
        self._turns = turns
        self._reserved = 0  # bytes of the line that is being read, if it is long
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._answering: asyncio.Queue[tuple[asyncio.Task[list[bytes]], int] | None] = asyncio.Queue()
        self._count = self._bytes = 0
        self._answer_bytes = 0  # size of the last answer
        self._freed = asyncio.Event()
        self._running: set[asyncio.Task[list[bytes]]] = set()

    async def __call__(self, send: Send) -> None:
        """Answers all lines. The response starts with the first answer, so that an earlier failure can have its own status.

        Raises:
            ClientGoneError: The client disconnected; the requests of its lines are cancelled.
        """
        self._scope[UNANSWERED] = 0
        gone = asyncio.Event()
        self._scope[GONE] = gone.set
        try:
            error = await self._answer_all(send, gone)
        finally:
            try:
                if self._running:
                    await self._turns.take(len(self._running) * LINE_BYTES)
            finally:
                for answering in self._running:
                    answering.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)
                self._running.clear()
                self._answering = asyncio.Queue()
                self._held.add(-self._bytes - self._reserved)
                self._scope.pop(UNANSWERED, None)  # after a removed key, the body may have no end
        try:
            if error is not None:
                raise error
        finally:
            del error

    async def _answer_all(self, send: Send, gone: asyncio.Event) -> BaseException | None:
        """Answers all lines; returns the error that ended this.

        The error does not refer to the tasks and the error group of this function. Otherwise they would keep each other until a garbage
        collection, which blocks the event loop for a tenth of a second if a thousand streams end.
        """
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(work) for work in (self._read(), self._start(), self._watch(gone))]
                await self._write(send)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as failed:
            failed.with_traceback(None)
            error = failed.exceptions[0]
            return error.with_traceback(None) if isinstance(error, BertServeError) else error
        return None

    async def _read(self) -> None:
        """Reads one chunk ahead of the one that is being cut, and detects a disconnected client."""
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
        """Waits for the connection to be lost, because nothing reads from the channel while a chunk waits to be cut."""
        await gone.wait()
        raise _client_gone()

    async def _start(self) -> None:
        """Starts a request for each line when there is capacity, in its turn."""
        cutter = LineCutter(self._max_bytes)
        while (chunk := await self._chunks.get()) is not None:
            # in pieces, because a chunk of 256 KB can have 128,000 lines, which would block the loop and need megabytes
            for at in range(0, len(chunk), SMALL_BYTES):
                piece = chunk[at : at + SMALL_BYTES]
                await self._turns.take(len(piece) // CUT_BYTES)
                for line in cutter.feed(piece):
                    await self._start_line(line)
                if cutter.size <= UNCOUNTED_BYTES:
                    await self._reserve(0)
                elif cutter.size > self._reserved:
                    await self._reserve(min(2 * cutter.size, self._max_bytes))
        if (last := cutter.end()) and not last.isspace():
            await self._start_line(last)
        self._answering.put_nowait(None)

    async def _reserve(self, size: int) -> None:
        """Reserves bytes for the line that is being read, and releases its previous reservation; waits until the bytes are available."""
        if size > self._reserved:
            await self._held.reserve_when_free(size - self._reserved)
        elif size < self._reserved:
            self._held.add(size - self._reserved)
        self._reserved = size

    async def _start_line(self, line: bytes) -> None:
        while True:
            while not self._has_room(line):
                self._freed.clear()
                await self._freed.wait()
            await self._turns.take(LINE_BYTES + len(line))
            if self._has_room(line):  # other streams may have taken the bytes
                break
        expected = self._answer_bytes
        if expected > UNCOUNTED_BYTES:
            try:
                await self._held.reserve_when_free(expected)
                self._held.add(-expected)  # `_hold` counts them below, before another task runs
            except UnavailableError:
                expected = 0  # the line gets this error, unless its answer is small
        answering = asyncio.create_task(self._answer_held(line, expected))
        self._running.add(answering)
        self._hold(1, len(line) + expected)
        self._answering.put_nowait((answering, len(line)))

    def _has_room(self, line: bytes) -> bool:
        """Returns whether another line may start; the bytes of the line and its answer count, unless it is the only line."""
        if not self._count:
            return True
        exceeded = self._held.full or self._bytes + len(line) + self._answer_bytes > self._max_bytes
        return self._count < self._max_requests and not exceeded

    async def _answer_held(self, line: bytes, expected: int) -> list[bytes]:
        """Answers a line, and corrects the number of bytes that its answer counts."""
        answer = await self._answer(line, expected)
        self._answer_bytes = sum(map(len, answer))
        self._hold(0, self._answer_bytes - expected)
        return answer

    async def _write(self, send: Send) -> None:
        """Sends the answers in the order of their lines; a client that reads slowly also slows the reading of its lines."""
        headers = [(b"content-type", MEDIA_TYPE.encode())]
        start: Message | None = {"type": "http.response.start", "status": 200, "headers": headers}
        while (item := await self._answering.get()) is not None:
            answering, size = item
            try:
                answer = await answering
            except UnauthorizedError as error:
                if start is None:  # otherwise the response can have the status of the error
                    await send_body(send, bytes(errors.response(error, self._scope[REQUEST_ID]).body) + b"\n")
                raise
            if start is not None:
                await send(start)
                start = None
            answer_bytes = sum(map(len, answer))
            answer[-1] += b"\n"
            await send_pieces(send, answer)
            self._running.discard(answering)
            self._hold(-1, -size - answer_bytes)
        if start is not None:
            await send(start)
        await send_body(send, b"")

    def _hold(self, lines: int, size: int) -> None:
        self._count += lines
        self._bytes += size
        self._held.add(size)
        self._scope[UNANSWERED] = self._count
        self._freed.set()


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection before its stream was answered.")


# A refused line takes these bytes of the turns in addition: it needs the event loop as long as another line, but waits for no inference thread.
WRONG_LINE_BYTES = 2 * LINE_BYTES
MAX_TRACED_LINES = 128  # lines of one stream that are traced
RETRY_LEAST_S, RETRY_MOST_S = 0.02, 1.0
_OK, _CLIENT_GONE, _SERVER_ERROR = 200, 499, 500


class _Admission:
    """The lock of the line that is parsed and admitted; `line` is the number of the line that has the lock, 0 for none."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.line = 0

    async def begin(self, line: int) -> None:
        """Waits until earlier lines are admitted."""
        await self._lock.acquire()
        self.line = line

    def end(self) -> None:
        """Lets the next line begin."""
        if self.line:
            self.line = 0
            self._lock.release()


class LineAnswerer:
    """Answers the lines of one stream."""

    def __init__(
        self,
        state: AppState,
        route: Route,
        incoming: Callable[[bytes], Incoming],
        scope: Scope,
        turns: Turns,
        *,
        timeout_s: float,
    ) -> None:
        """Creates it.

        Args:
            state: The models, metrics and limits.
            route: The stream's route.
            incoming: Turns a line into a request; can raise NotFoundError.
            scope: The stream's scope, as RequestMiddleware has completed it.
            turns: Reads long lines.
            timeout_s: Seconds until a line must have started, counted from its reading, or from the time when earlier lines left capacity.
        """
        self._state = state
        self._route = route
        self._incoming = incoming
        self._scope = scope
        self._turns = turns
        self._timeout_s = timeout_s
        self._lines = 0
        self._admission = _Admission()
        self._share = Share(on_admitted=self._admission.end)
        self._answered = asyncio.Event()
        self._capacity_at = 0.0  # when earlier lines last left capacity, on the event loop's clock
        self._read_s = 0.0  # seconds in which lines were read, which do not count towards the deadlines of those behind them

    async def answer(self, line: bytes, expected: int) -> list[bytes]:
        """Returns the pieces of the answer to a line as JSON, or its error in the usual JSON shape; counts both.

        `expected` is the number of bytes that are already counted for the answer; a much larger answer reserves more.

        One line of a stream at a time is parsed and admitted, because a parsed line can need many times the memory of its bytes.

        Raises:
            UnauthorizedError: The caller's key was removed; the stream must end.
        """
        self._scope[AUTH].check_again(self._scope[CALLER])
        loop = asyncio.get_running_loop()
        start, timed_from, read_before_s = time.perf_counter(), loop.time(), self._read_s
        trace = self._begin(start)
        number = self._lines
        labels, status = (self._route.task or UNKNOWN, UNKNOWN), _CLIENT_GONE
        reservation = ByteReservation(self._state.held_bytes)
        try:
            if len(line) > self._state.max_body_bytes:
                raise TooLargeError(
                    "the line has more than {max_body_bytes} bytes; send less in one line; the operator can raise --max-body-bytes.",
                    max_body_bytes=self._state.max_body_bytes,
                )
            await self._admission.begin(number)
            reads_from = loop.time()
            call = await self._turns.read(self._route, self._incoming(line))
            self._read_s += loop.time() - reads_from
            labels = (call.task, call.model.name)
            timed_from += self._read_s - read_before_s
            prediction = await self._predict(call, number, len(line), timed_from, trace)
            if prediction.answer_bytes > max(UNCOUNTED_BYTES, 2 * expected):  # it is an upper bound, often twice the length
                reservation.grow(3 * prediction.answer_bytes // 2 - expected)  # for the results, and the answer that is built of them
            content = await content_of(call, prediction)
            del prediction
            body, status = content.pieces, _OK
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.message = f"line {number}: {error.message}"
            refusal = errors.response(error, self._scope[REQUEST_ID])
            body, status = [bytes(refusal.body)], refusal.status_code
            if status >= _SERVER_ERROR:  # errors of callers are only in the answers, because a stream can have millions of lines
                self._scope[ERROR_LOG].write(error, of_request(self._scope))
            await self._turns.take(WRONG_LINE_BYTES)
        finally:
            reservation.release()  # the stream counts the answer before another task runs
            if self._admission.line == number:
                self._admission.end()
            if trace is not None:
                attributes = {"bertserve.task": labels[0], "bertserve.model": labels[1], "bertserve.line.status": str(status)}
                trace.tracer.end(trace, time.perf_counter(), attributes=attributes, failed=status >= _SERVER_ERROR)
            self._state.metrics.requests_of(*labels, status).inc()
            self._answered.set()
            if labels[1] != UNKNOWN:
                self._state.metrics.model(*labels).request_seconds.observe(time.perf_counter() - start)
        return body

    def _begin(self, start: float) -> Trace | None:
        """Returns the trace of a line. Only the first lines of a stream have one, because a stream can have millions."""
        stream = recorded_trace(self._scope)
        self._lines += 1
        if stream is None or self._lines > MAX_TRACED_LINES:
            return None
        return stream.tracer.begin_within(stream, "line", start)

    async def _predict(self, call: Call, number: int, size: int, timed_from: float, trace: Trace | None) -> Prediction:
        """Returns the prediction; while the queue is full, it waits and tries again until the line's deadline."""
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        requests = call.body.requests(call.model.bundle.manifest)
        wait_s = 0.0
        while True:
            left_s = max(timed_from, self._capacity_at) + timeout_s - loop.time()
            try:
                return await call.model.predict(
                    requests,
                    timeout_s=max(left_s, 0.0),
                    task=call.task,
                    counts_refusals=False,
                    trace=trace,
                    share=self._share,
                )
            except RefusedError as error:
                if self._admission.line != number:  # it was admitted, but has more tokens, memory or answer than estimated
                    self._answered.set()  # the line with the lock may wait for this one, which holds no capacity now
                    await self._admission.begin(number)
                if error.reason == SHARE_FULL:
                    await self._wait_for_own_lines()
                    continue
                wait_s = min(max(error.retry_after_s, RETRY_LEAST_S, 2 * wait_s), RETRY_MOST_S)
                if wait_s >= left_s:
                    raise
                await asyncio.sleep(wait_s)
                await self._turns.take(LINE_BYTES + size)  # estimating the work of the largest lines takes milliseconds
            except BertServeError as error:
                error.name_input(many=call.body.is_list, subject=call.body.subject)
                raise

    async def _wait_for_own_lines(self) -> None:
        """Waits until another line of the stream is answered, unless there is none."""
        self._answered.clear()
        if self._share.requests:
            await self._answered.wait()
        self._capacity_at = asyncio.get_running_loop().time()
