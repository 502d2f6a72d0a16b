"""JSON Lines: each line of the body is a request. The answers are sent in the order of the lines, each as soon as it is ready.

The lines in progress, which are read and not yet answered, are limited by number and bytes. At the limit, nothing more is read from the
connection, so that TCP slows the sender down.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from math import ceil
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from bertserve.service.api import error_responses
from bertserve.service.api.call import Call
from bertserve.service.api.request import LARGE_BYTES, RequestContext, take_turn, too_large_error
from bertserve.service.errors import CLIENT_GONE, BertServeError, HttpError, MalformedRequestError, RefusedError
from bertserve.service.metrics import UNKNOWN

if TYPE_CHECKING:
    from bertserve.service.api.routes import InferenceRoute

MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
# Limit of the bytes of the lines in progress, unless there is only one line; each counts as 64 KiB / `max_stream_requests` at least. More
# lines would wait for each other in the queue, where their deadlines would pass.
MAX_BYTES = 2**16
READ_AHEAD_BYTES = 2**18  # what is read while lines are in progress, because only reading detects a disconnected client
MIN_RETRY_S = 0.1  # seconds until a refused line asks again, at least


class LineStream:
    """Answers the lines of one request."""

    def __init__(
        self, route: InferenceRoute, request: RequestContext, timeout_s: float, error_log: error_responses.ErrorLog, turns: asyncio.Lock
    ) -> None:
        """Prepares the stream of a request.

        Each line must have started `timeout_s` seconds after its admission. The log gets failures of the service; errors of callers are
        only in the answers, because a stream can have millions of lines.
        """
        self._route, self._request, self._timeout_s, self._error_log, self._turns = route, request, timeout_s, error_log, turns
        self._settings = request.state.settings
        self._unread, self._is_complete = bytearray(), False  # what was received of the lines that are not in progress
        self._lines: asyncio.Queue[tuple[asyncio.Task[bytes], int] | None] = asyncio.Queue()
        self._number = self._bytes = 0  # number of the last line in progress; bytes of all lines in progress
        self._answer_sent = asyncio.Event()

    async def respond(self, receive: Receive, send: Send) -> None:
        """Answers all lines. The response starts with the first answer, so that an earlier failure can have its own status.

        Raises:
            MalformedRequestError: The client speaks HTTP/1.0, which has no chunks.
            HttpError: The client disconnected, so the requests of its lines are cancelled (499); or no line came in time while none was
                in progress (408).
        """
        if self._request.scope.get("http_version") == "1.0":
            raise MalformedRequestError("the answer to JSON Lines needs HTTP/1.1; with nginx, set `proxy_http_version 1.1`.")
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reader = self._tasks.create_task(self._read(receive))
                while (line := await self._next_line()) is not None:
                    answer, size = line
                    await self._send(send, await answer + b"\n")
                    self._bytes -= size
                    self._start_lines()
                    self._answer_sent.set()
                await self._send(send, b"", more=False)
                reader.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if self._request.status == 0:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": [(b"content-type", MEDIA_TYPE.encode())]})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _next_line(self) -> tuple[asyncio.Task[bytes], int] | None:
        """Returns the task and the size of the next line; None after the last one."""
        timeout_s = self._settings.body_timeout_s if self._lines.empty() else None  # a timer for each line would cost time
        try:
            async with asyncio.timeout(timeout_s):
                return await self._lines.get()
        except TimeoutError:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT, "no line came within {limit:g} s; end the request after the last line.", limit=timeout_s
            ) from None

    async def _read(self, receive: Receive) -> None:
        """Reads ahead of the lines in progress, and until the client disconnects."""
        while (message := await receive())["type"] != "http.disconnect":
            self._unread += message.get("body", b"")
            if not message.get("more_body", False):
                self._unread += b"\n"
                self._is_complete = True
            self._start_lines()
            while self._bytes and len(self._unread) > READ_AHEAD_BYTES:
                self._answer_sent.clear()
                await self._answer_sent.wait()
        raise HttpError(CLIENT_GONE, "the client closed the connection before its stream was answered.")

    def _start_lines(self) -> None:
        """Starts a request for each line that is not blank, while there is room for it."""
        while (end := self._unread.find(b"\n")) >= 0:
            line = bytes(self._unread[:end])
            if not line.strip():
                self._unread = self._unread.lstrip()  # also removes the blank lines that follow, of which there can be many
                continue
            size = max(len(line), ceil(MAX_BYTES / self._settings.max_stream_requests))
            if self._bytes and self._bytes + size > MAX_BYTES:
                return
            del self._unread[: end + 1]
            self._bytes += size
            self._number += 1
            self._lines.put_nowait((self._tasks.create_task(self._answer(line, self._number)), size))
        del self._unread[self._settings.max_body_bytes + 1 :]  # a line that is too long keeps one byte too many, and is refused
        if self._is_complete:
            self._lines.put_nowait(None)

    async def _answer(self, line: bytes, number: int) -> bytes:
        """Returns the answer to a line as JSON, or its error in the usual JSON shape; counts both."""
        start, request, metrics = time.perf_counter(), self._request, self._request.state.metrics
        task, model, status = self._route.task or UNKNOWN, UNKNOWN, CLIENT_GONE
        try:
            request.state.auth.check(self._route.access, request.scope["headers"])  # again for each line, because a stream can have no end
            if len(line) > self._settings.max_body_bytes:
                raise too_large_error("line", len(line), self._settings.max_body_bytes)
            if len(line) > LARGE_BYTES:
                await take_turn(self._turns)
            call = self._route.read_call(line, request)  # it looks the model up for each line, because it can be reloaded during the stream
            task, model = call.task, call.model.name
            body, status = await self._run(call), HTTPStatus.OK
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.add_prefix(f"line {number}: ")
            refusal = error_responses.response(error, request.id)
            body, status = bytes(refusal.body), refusal.status_code
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._error_log.write(error, request.log_fields())
        finally:
            metrics.requests_of(task, model, status).inc()
            if model != UNKNOWN:
                metrics.model(task, model).request_seconds.observe(time.perf_counter() - start)
        return body

    async def _run(self, call: Call) -> bytes:
        """Returns the JSON of the response. A refused line asks again for `timeout_s` seconds, and only its last refusal counts."""
        end = time.monotonic() + self._timeout_s
        while True:
            is_last = time.monotonic() >= end
            try:
                _, body, _ = await call.answer(self._turns, self._timeout_s, counts_refusals=is_last)
                return body
            except RefusedError as error:
                if is_last:
                    raise
                # each attempt can tokenize the line again
                await asyncio.sleep(max(MIN_RETRY_S, min(error.retry_after_s, end - time.monotonic())))
