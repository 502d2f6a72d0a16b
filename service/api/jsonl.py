"""JSON Lines: each line of the body is a request. The answers are sent in the order of the lines, each as soon as it is ready.

The lines that are read and not yet answered are limited by number and bytes. At the limit, nothing more is read from the connection, so
that TCP slows the sender down.
"""

from __future__ import annotations

import asyncio
import re
import time

from starlette.types import Message, Receive

from bertserve.service.api import errors
from bertserve.service.api.call import Call, Incoming
from bertserve.service.api.request import Request
from bertserve.service.api.routes import Route
from bertserve.service.errors import BertServeError, ClientGoneError, MalformedRequestError, RefusedError, SlowRequestError, TooLargeError
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.build import AppState
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.json_text import to_json
from bertserve.service.tracing.trace import Trace

MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
# Bytes of lines in progress, unless there is only one line. More of them would wait for each other until their deadlines, and delay other callers.
IN_PROGRESS_BYTES = 2**16
# with the blank lines that follow, of which a chunk can have 65,536
LINE_ENDS = re.compile(rb"\n\s*")
# Bytes of answers in progress, unless there is only one line: as many lines are in progress as have room if all get an answer of the
# expected size. That is the size of the last one, or half of the size that was expected before it, if that is more.
ANSWER_BYTES = 2**22
FIRST_ANSWER_BYTES = 2**20
READ_AHEAD = 8  # chunks of up to 64 KiB; only reading detects a client that has left
MAX_TRACED_LINES = 128  # lines of one stream that are traced
MIN_RETRY_S, MAX_RETRY_S = 0.02, 1.0  # wait of a refused line before it asks again
_OK, _CLIENT_GONE, _SERVER_ERROR = 200, 499, 500


class LineStream:
    """Answers the lines of one request."""

    def __init__(self, state: AppState, route: Route, request: Request, *, name: str | None, timeout_s: float) -> None:
        """Creates it.

        Args:
            state: The models, metrics and limits.
            route: The stream's route.
            request: The stream's request.
            name: The model in the path, or None.
            timeout_s: Seconds until a line must have started, counted from its reading, or from the last answer of the stream.

        Raises:
            NotFoundError: There is no such model.
            MalformedRequestError: The client speaks HTTP/1.0, which has no chunks.
        """
        if request.scope.get("http_version") == "1.0":
            raise MalformedRequestError("the answer to JSON Lines needs HTTP/1.1; with nginx, set `proxy_http_version 1.1`.")
        if name is not None:
            state.registry.get(name)
        self._state, self._route, self._request, self._name, self._timeout_s = state, route, request, name, timeout_s
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(READ_AHEAD)
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes], int] | None] = asyncio.Queue()
        self._lines = self._count = self._bytes = 0  # lines so far; those in progress, and their bytes
        self._expected = FIRST_ANSWER_BYTES  # bytes of an answer
        self._sent = asyncio.Event()
        self._answered_at = 0.0  # time of the last answer on the event loop's clock

    async def answer(self, receive: Receive) -> None:
        """Answers all lines. The response starts with the first answer, so that an earlier failure can have its own status.

        Raises:
            ClientGoneError: The client disconnected; the requests of its lines are cancelled.
            SlowRequestError: The client sent nothing while no line was in progress.
        """
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(receive))
                group.create_task(self._cut(group))
                await self._write()
                reader.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _read(self, receive: Receive) -> None:
        """Reads chunks ahead of the one that is being cut, because only reading detects a disconnected client."""
        more = True
        while (message := await self._receive(receive))["type"] != "http.disconnect":
            if more:
                await self._chunks.put(message.get("body", b""))
                if not (more := message.get("more_body", False)):
                    await self._chunks.put(None)
        raise ClientGoneError("the client closed the connection before its stream was answered.")

    async def _cut(self, group: asyncio.TaskGroup) -> None:
        """Starts a request for each line."""
        line, size = bytearray(), self._state.max_body_bytes + 1
        while (chunk := await self._chunks.get()) is not None:
            first, *rest = LINE_ENDS.split(chunk)
            line += first[: size - len(line)]  # a line that is too long keeps one byte too many, and is refused
            if not rest:
                continue
            *whole, last = rest
            for each in (bytes(line), *whole):
                if each and not each.isspace():
                    await self._start(each[:size], group)
            line = bytearray(last[:size])
        if line and not line.isspace():
            await self._start(bytes(line), group)
        self._answers.put_nowait(None)

    async def _receive(self, receive: Receive) -> Message:
        """Returns the next message. The client may pause while lines are in progress."""
        timeout_s = self._state.body_timeout_s
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await receive()
            except TimeoutError:
                if not self._count:
                    raise SlowRequestError(
                        "no line came within {timeout_s:g} s; end the request after the last line.", timeout_s=timeout_s
                    ) from None

    async def _start(self, line: bytes, group: asyncio.TaskGroup) -> None:
        """Starts the request of a line when there is room for it."""
        while self._count and (
            self._count >= min(self._state.max_stream_requests, ANSWER_BYTES // self._expected)
            or self._bytes + len(line) > IN_PROGRESS_BYTES
        ):
            self._sent.clear()
            await self._sent.wait()
        self._lines += 1
        self._count += 1
        self._bytes += len(line)
        self._answers.put_nowait((group.create_task(self._answer(line, self._lines)), len(line)))

    async def _write(self) -> None:
        """Sends the answers; a client that reads slowly also slows the reading of its lines."""
        send, started = self._request.send, False
        start = {"type": "http.response.start", "status": _OK, "headers": [(b"content-type", MEDIA_TYPE.encode())]}
        while (item := await self._answers.get()) is not None:
            task, size = item
            answer = await task
            if not started:
                await send(start)
                started = True
            await send({"type": "http.response.body", "body": answer + b"\n", "more_body": True})
            self._count -= 1
            self._bytes -= size
            self._sent.set()
        if not started:
            await send(start)
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, line: bytes, number: int) -> bytes:
        """Returns the answer to a line as JSON, or its error in the usual JSON shape; counts both."""
        start, state, request = time.perf_counter(), self._state, self._request
        stream = request.recorded_trace if number <= MAX_TRACED_LINES else None
        trace = None if stream is None else stream.tracer.begin_within(stream, "line", start)
        labels, status = (self._route.task or UNKNOWN, UNKNOWN), _CLIENT_GONE
        try:
            request.auth.check_again(request.caller)
            if len(line) > state.max_body_bytes:
                raise TooLargeError(
                    "the line has more than {max_body_bytes} bytes; send less in one line; the operator can raise --max-body-bytes.",
                    max_body_bytes=state.max_body_bytes,
                )
            # the model is looked up for each line, because it can be reloaded during the stream
            named = None if self._name is None else state.registry.get(self._name)
            call = self._route.read(Incoming(line, request.headers, named, state.registry, state.limits, request.id))
            labels = (call.task, call.model.name)
            body, status = to_json(call.answer(await self._predict(call, trace))), _OK
            self._expected = max(len(body), self._expected // 2)
            self._answered_at = asyncio.get_running_loop().time()
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.message = f"line {number}: {error.message}"
            refusal = errors.response(error, request.id)
            body, status = bytes(refusal.body), refusal.status_code
            if status >= _SERVER_ERROR:  # errors of callers are only in the answers, because a stream can have millions of lines
                request.error_log.write(error, request.log_fields())
        finally:
            end = time.perf_counter()
            if trace is not None:
                attributes = {"bertserve.task": labels[0], "bertserve.model": labels[1], "bertserve.line.status": str(status)}
                trace.tracer.end(trace, end, attributes=attributes, failed=status >= _SERVER_ERROR)
            state.metrics.requests_of(*labels, status).inc()
            if labels[1] != UNKNOWN:
                state.metrics.model(*labels).request_seconds.observe(end - start)
        return body

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
