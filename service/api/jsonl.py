"""JSON Lines: each line of the body is a request. The answers are sent in the order of the lines, each as soon as it is ready.

The lines that are read and not yet answered are limited by number and bytes. At the limit, nothing more is read from the connection, so
that TCP slows the sender down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from bertserve.service.api import errors
from bertserve.service.api.auth import AUTH, CALLER
from bertserve.service.api.call import Call, Incoming
from bertserve.service.api.errors import GONE, UNANSWERED
from bertserve.service.api.middleware import ERROR_LOG, REQUEST_ID, of_request, recorded_trace
from bertserve.service.api.routes import Route
from bertserve.service.errors import BertServeError, ClientGoneError, RefusedError, TooLargeError, UnauthorizedError
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.build import AppState
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.json_text import to_json
from bertserve.service.tracing.trace import Trace

MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
# Bytes of lines in progress, unless there is only one line. More of them would wait for each other until their deadlines, and delay other callers.
IN_PROGRESS_BYTES = 2**16
MAX_TRACED_LINES = 128  # lines of one stream that are traced
MIN_RETRY_S, MAX_RETRY_S = 0.02, 1.0  # wait of a refused line before it asks again
_OK, _CLIENT_GONE, _SERVER_ERROR = 200, 499, 500


class LineCutter:
    """Cuts chunks into lines; it keeps at most `max_bytes` + 1 bytes of a line, and drops the rest."""

    def __init__(self, max_bytes: int) -> None:
        """Starts a line."""
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the lines that end in a chunk, without blank lines."""
        first, *rest = chunk.split(b"\n")
        self._keep(first)
        if not rest:
            return []
        lines = [self.end(), *(line[: self._max_bytes + 1] for line in rest[:-1])]
        self._keep(rest[-1])
        return [line for line in lines if line and not line.isspace()]

    def end(self) -> bytes:
        """Returns the unfinished line, and starts another one."""
        line, self._parts, self._size = b"".join(self._parts), [], 0
        return line

    def _keep(self, piece: bytes) -> None:
        if room := self._max_bytes + 1 - self._size:
            self._parts.append(piece[:room])
            self._size += len(self._parts[-1])


class LineStream:
    """Answers the lines of one request."""

    def __init__(
        self, scope: Scope, receive: Receive, answer: Callable[[bytes], Coroutine[Any, Any, bytes]], *, max_requests: int, max_bytes: int
    ) -> None:
        """Creates it.

        Args:
            scope: The request's scope.
            receive: The request's ASGI channel.
            answer: Returns the answer to a line, or its error, as JSON.
            max_requests: Maximum number of lines that are read and not yet answered.
            max_bytes: Maximum bytes of a line.
        """
        self._scope, self._receive, self._answer = scope, receive, answer
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes], int] | UnauthorizedError | None] = asyncio.Queue()
        self._count = self._bytes = 0
        self._answered = asyncio.Event()

    async def __call__(self, send: Send) -> None:
        """Answers all lines. The response starts with the first answer, so that an earlier failure can have its own status.

        Raises:
            ClientGoneError: The client disconnected; the requests of its lines are cancelled.
            UnauthorizedError: The caller's key was removed before the first line.
        """
        self._scope[UNANSWERED] = 0
        gone = asyncio.Event()
        self._scope[GONE] = gone.set
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(work) for work in (self._read(), self._cut(group), _raise_when(gone))]
                await self._write(send)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._scope.pop(UNANSWERED, None)
            self._scope.pop(GONE, None)

    async def _read(self) -> None:
        """Reads one chunk ahead of the one that is being cut, and detects a disconnected client."""
        more = True
        while (message := await self._receive())["type"] != "http.disconnect":
            if more:
                more = message.get("more_body", False)
                await self._chunks.put(message.get("body", b""))
                if not more:
                    await self._chunks.put(None)
        raise _client_gone()

    async def _cut(self, group: asyncio.TaskGroup) -> None:
        """Starts a request for each line."""
        cutter, end = LineCutter(self._max_bytes), None
        try:
            while (chunk := await self._chunks.get()) is not None:
                for line in cutter.feed(chunk):
                    await self._start(line, group)
            if (last := cutter.end()) and not last.isspace():
                await self._start(last, group)
        except UnauthorizedError as error:  # the key was removed; earlier lines are still answered
            end = error
        self._answers.put_nowait(end)

    async def _start(self, line: bytes, group: asyncio.TaskGroup) -> None:
        while self._count and (self._count >= self._max_requests or self._bytes + len(line) > IN_PROGRESS_BYTES):
            self._answered.clear()
            await self._answered.wait()
        self._scope[AUTH].check_again(self._scope[CALLER])
        self._hold(1, len(line))
        self._answers.put_nowait((group.create_task(self._answer(line)), len(line)))

    def _hold(self, lines: int, size: int) -> None:
        self._count += lines
        self._bytes += size
        self._scope[UNANSWERED] = self._count
        self._answered.set()

    async def _write(self, send: Send) -> None:
        """Sends the answers; a client that reads slowly also slows the reading of its lines."""
        start: Message | None = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", MEDIA_TYPE.encode())]}
        while (item := await self._answers.get()) is not None:
            if isinstance(item, UnauthorizedError):
                if start is not None:  # the response can have the status of the error
                    raise item
                await send(_part(bytes(errors.response(item, self._scope[REQUEST_ID]).body)))
                break
            task, size = item
            answer = await task
            if start is not None:
                await send(start)
                start = None
            await send(_part(answer))
            self._hold(-1, -size)
        if start is not None:
            await send(start)
        await send({"type": "http.response.body", "body": b""})


def _part(answer: bytes) -> Message:
    return {"type": "http.response.body", "body": answer + b"\n", "more_body": True}


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection before its stream was answered.")


async def _raise_when(gone: asyncio.Event) -> None:
    """Waits for the connection to be lost, because nothing reads from the channel while lines wait."""
    await gone.wait()
    raise _client_gone()


class LineAnswerer:
    """Answers the lines of one stream."""

    def __init__(self, state: AppState, route: Route, incoming: Callable[[bytes], Incoming], scope: Scope, *, timeout_s: float) -> None:
        """Creates it.

        Args:
            state: The models, metrics and limits.
            route: The stream's route.
            incoming: Turns a line into a request; can raise NotFoundError.
            scope: The stream's scope, as RequestMiddleware has completed it.
            timeout_s: Seconds until a line must have started, counted from its reading, or from the last answer of the stream.
        """
        self._state, self._route, self._incoming, self._scope = state, route, incoming, scope
        self._timeout_s = timeout_s
        self._lines = 0
        self._answered_at = 0.0  # on the event loop's clock

    async def answer(self, line: bytes) -> bytes:
        """Returns the answer to a line as JSON, or its error in the usual JSON shape; counts both."""
        start = time.perf_counter()
        trace = self._begin(start)
        number, labels, status = self._lines, (self._route.task or UNKNOWN, UNKNOWN), _CLIENT_GONE
        try:
            if len(line) > self._state.max_body_bytes:
                raise TooLargeError(
                    "the line has more than {max_body_bytes} bytes; send less in one line; the operator can raise --max-body-bytes.",
                    max_body_bytes=self._state.max_body_bytes,
                )
            call = self._route.read(self._incoming(line))
            labels = (call.task, call.model.name)
            body, status = to_json(call.answer(await self._predict(call, trace))), _OK
            self._answered_at = asyncio.get_running_loop().time()
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.message = f"line {number}: {error.message}"
            refusal = errors.response(error, self._scope[REQUEST_ID])
            body, status = bytes(refusal.body), refusal.status_code
            if status >= _SERVER_ERROR:  # errors of callers are only in the answers, because a stream can have millions of lines
                self._scope[ERROR_LOG].write(error, of_request(self._scope))
        finally:
            if trace is not None:
                attributes = {"bertserve.task": labels[0], "bertserve.model": labels[1], "bertserve.line.status": str(status)}
                trace.tracer.end(trace, time.perf_counter(), attributes=attributes, failed=status >= _SERVER_ERROR)
            self._state.metrics.requests_of(*labels, status).inc()
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

    async def _predict(self, call: Call, trace: Trace | None) -> Prediction:
        """Returns the prediction; while the queue is full, it waits and tries again until the line's deadline."""
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        read_at = loop.time()
        requests = call.body.requests(call.model.bundle.manifest)
        wait_s = 0.0
        while True:
            left_s = max(max(read_at, self._answered_at) + timeout_s - loop.time(), 0.0)
            try:
                return await call.model.predict(requests, timeout_s=left_s, task=call.task, counts_refusals=False, trace=trace)
            except RefusedError as error:
                wait_s = min(max(error.retry_after_s, MIN_RETRY_S, 2 * wait_s), MAX_RETRY_S)
                if wait_s >= left_s:
                    raise
                await asyncio.sleep(wait_s)
            except BertServeError as error:
                error.name_input(many=call.body.is_list, subject=call.body.subject)
                raise
