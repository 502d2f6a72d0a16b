"""JSON Lines: each line of the body is a request. The results are sent in the order of the lines, each as soon as it is ready.

A line is in progress until its result is sent. The number and the bytes of the lines in progress are limited. At the limit, nothing more is
read from the connection, so that TCP slows the sender down. If a client does not read, the results of these lines stay in memory.
"""

import asyncio
import time
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from bertserve.service.api import error_responses
from bertserve.service.api.receiving import too_large_error
from bertserve.service.api.request import LARGE_BYTES, RequestContext
from bertserve.service.errors import CLIENT_GONE, BertServeError, HttpError, MalformedRequestError
from bertserve.service.metrics import UNKNOWN

if TYPE_CHECKING:
    from bertserve.service.api.routing import InferenceRoute

LINES_TYPE = "application/x-ndjson"  # the content type of JSON Lines; requests can also use the other names
LINES_TYPES = frozenset({LINES_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
MEAN_BYTES = 2**11  # maximum mean size of the lines in progress: longer ones would wait for each other in the queue until they expire
MAX_TRACED_LINES = 128  # a stream can contain millions of lines
READ_AHEAD_BYTES = 2**18  # bytes to read while lines are in progress, because only reading detects a disconnected client


class LineStream:
    """Responds to the lines of one request.

    Each line must have started `timeout_s` seconds after its admission. The log shows failures of the service. Errors of callers are only
    in the results, because a stream can contain millions of lines.
    """

    def __init__(self, route: "InferenceRoute", request: RequestContext, timeout_s: float, error_log: error_responses.ErrorLog) -> None:
        self._route = route
        self._request = request
        self._timeout_s = timeout_s
        self._error_log = error_log
        self._settings = request.state.settings
        self._unread = bytearray()  # received bytes of lines that are not in progress
        self._is_complete = False  # whether the end of the body was received
        self._lines: deque[tuple[asyncio.Task[tuple[bytes, int]], int]] = deque()  # the lines in progress, with their bytes
        self._number = 0  # number of the last started line
        self._bytes = 0  # total bytes of the lines in progress
        self._progress = asyncio.Event()  # wakes the reader and the writer

    async def respond(self, receive: Receive, send: Send) -> None:
        """Responds to all lines. The response starts with the first result, so that an earlier failure can set the status.

        Raises:
            MalformedRequestError: The client speaks HTTP/1.0, which has no chunks.
            HttpError: The client disconnected (499), or no line came in time while none was in progress (408).
        """
        if self._request.scope.get("http_version") == "1.0":
            raise MalformedRequestError("the answer to JSON Lines needs HTTP/1.1; with nginx, set `proxy_http_version 1.1`.")
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reader = self._tasks.create_task(self._read(receive))
                while await self._has_line():
                    body, status = await self._lines[0][0]
                    await self._send(send, body + b"\n")
                    if status == HTTPStatus.UNAUTHORIZED:  # the key was removed, and the stream could be endless
                        break
                    self._bytes -= self._lines.popleft()[1]
                    self._start_lines()
                await self._send(send, b"", more=False)
                for task in (reader, *(line for line, _ in self._lines)):
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if self._request.status == 0:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": [(b"content-type", LINES_TYPE.encode())]})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _has_line(self) -> bool:
        """Waits until a line is in progress; returns false after the last one."""
        limit = None if self._lines else self._settings.body_timeout_s  # a timer for each line would cost time
        try:
            async with asyncio.timeout(limit):
                while not (self._lines or self._is_complete):
                    await self._progress.wait()
        except TimeoutError:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT, "no line came within {limit:g} s; end the request after the last line.", limit=limit
            ) from None
        return bool(self._lines)

    async def _read(self, receive: Receive) -> None:
        """Reads ahead of the lines in progress, and until the client disconnects."""
        while (message := await receive())["type"] != "http.disconnect":
            self._is_complete = not message.get("more_body", False)
            self._unread += message.get("body", b"") + (b"\n" if self._is_complete else b"")
            self._start_lines()
            while self._lines and len(self._unread) > READ_AHEAD_BYTES:
                await self._progress.wait()
        raise HttpError(CLIENT_GONE, "the client closed the connection before the end of the answers.")

    def _start_lines(self) -> None:
        """Starts a request for each line that is not blank, while the limits allow it."""
        max_lines = self._settings.max_stream_requests
        while len(self._lines) < max_lines and self._bytes < max_lines * MEAN_BYTES:
            if self._unread[:1].isspace():
                self._unread = self._unread.lstrip()  # blank lines, of which there can be many
            end = self._unread.find(b"\n")
            if end < 0:
                del self._unread[self._settings.max_body_bytes + 1 :]  # of a line that is too long, one byte too many stays and is refused
                break
            self._number += 1
            self._bytes += end
            self._lines.append((self._tasks.create_task(self._answer_line(bytes(self._unread[:end]), self._number)), end))
            del self._unread[: end + 1]
        self._progress.set()
        self._progress.clear()

    async def _answer_line(self, line: bytes, number: int) -> tuple[bytes, int]:
        """Returns the result of a line as JSON, or its error in the usual JSON shape, and the status; counts both."""
        start, request = time.perf_counter(), self._request
        task, model, status = self._route.task or UNKNOWN, UNKNOWN, CLIENT_GONE
        trace = None
        if request.trace is not None and request.trace.is_recording and number <= MAX_TRACED_LINES:
            trace = request.trace.start_line(start)
        try:
            request.state.auth.identify(self._route.access, request.scope["headers"])  # for each line: a stream can be endless
            if len(line) > self._settings.max_body_bytes:
                raise too_large_error("line", len(line), self._settings.max_body_bytes)
            if len(line) > LARGE_BYTES:
                await request.take_turn()
            call = self._route.read_call(line, request)  # it looks the model up for each line, because it can be reloaded during the stream
            task, model = call.task, call.model.name
            body, status = await call.run_when_admitted(request, self._timeout_s, trace), HTTPStatus.OK
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.add_prefix(f"line {number}: ")
            refusal = error_responses.error_response(error, request.id, self._route.error_format)
            body, status = bytes(refusal.body), refusal.status_code
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._error_log.write(error, request.log_fields())
        finally:
            request.state.metrics.record_request(task, model, status, time.perf_counter() - start)
            if trace is not None:
                attributes = {"bertserve.task": task, "bertserve.model": model, "bertserve.line.status": str(status)}
                trace.end(time.perf_counter(), name="line", attributes=attributes, failed=status >= HTTPStatus.INTERNAL_SERVER_ERROR)
        return body, status
