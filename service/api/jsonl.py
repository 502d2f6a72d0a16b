"""JSON Lines: each line of the body is a request. The answers are sent in the order of the lines, each as soon as it is ready.

The lines that are read and not yet answered are limited by number and bytes. At the limit, nothing more is read from the connection, so
that TCP slows the sender down.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import Receive, Send

from bertserve.service.api import error_answers
from bertserve.service.api.call import Call
from bertserve.service.api.request import Request
from bertserve.service.api.routes import Route
from bertserve.service.api.turns import LARGE_BYTES, Turns
from bertserve.service.api_keys import Access
from bertserve.service.errors import BertServeError, ClientGoneError, MalformedRequestError, RefusedError, SlowRequestError, TooLargeError
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.request_progress import Prediction
from bertserve.service.tasks.json_text import to_json

MEDIA_TYPE = "application/x-ndjson"
MEDIA_TYPES = frozenset({MEDIA_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
LINE_ENDS = re.compile(rb"\n\s*")  # with the blank lines that follow, of which a chunk can have 65,536
# Limit of the weights of the lines in progress, unless there is only one line. The weight of a line is its number of bytes, a 64th of the
# bytes of the last answer, or 64 KiB / `max_stream_requests`, whichever is the largest. So a stream whose client does not read holds few
# large answers, and its lines do not wait for each other.
MAX_WEIGHT, ANSWER_SHARE = 2**16, 64
FIRST_ANSWER_BYTES = 2**20  # size of an answer until one is known
READ_AHEAD = 8  # chunks of up to 64 KiB
MIN_RETRY_S = 0.1  # seconds until a refused line asks again, at least
CLIENT_GONE = 499  # of nginx; no standard has a status for it


@dataclass(eq=False)
class LineStream:
    """Answers the lines of one request.

    Attributes:
        route: The stream's route.
        request: The stream's request.
        timeout_s: Seconds until a line must have started, counted from its admission.
        error_log: Takes failures of the service; errors of callers are only in the answers, because a stream can have millions of lines.
        turns: The turns of large lines and answers.
    """

    route: Route
    request: Request
    timeout_s: float
    error_log: error_answers.ErrorLog
    turns: Turns

    def __post_init__(self) -> None:
        self._state = self.request.state
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._chunk_taken = asyncio.Event()
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes] | None, int]] = asyncio.Queue()
        self._lines = self._weight = 0  # lines so far; weight of those in progress
        self._last_answer_bytes = FIRST_ANSWER_BYTES
        self._answer_sent = asyncio.Event()

    async def answer(self, receive: Receive, send: Send) -> None:
        """Answers all lines. The response starts with the first answer, so that an earlier failure can have its own status.

        Raises:
            MalformedRequestError: The client speaks HTTP/1.0, which has no chunks.
            ClientGoneError: The client disconnected; the requests of its lines are cancelled.
            SlowRequestError: The client sent nothing while no line was in progress.
        """
        if self.request.scope.get("http_version") == "1.0":
            raise MalformedRequestError("the answer to JSON Lines needs HTTP/1.1; with nginx, set `proxy_http_version 1.1`.")
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(receive))
                group.create_task(self._cut(group))
                await self._write(send)
                reader.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _read(self, receive: Receive) -> None:
        """Reads chunks ahead of the one that is being cut, because only reading detects a disconnected client."""
        more, timeout_s = True, self._state.settings.body_timeout_s
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await receive()
            except TimeoutError:
                # the client may pause while lines are in progress, and after their last answer
                if self._weight or self._answer_sent.is_set():
                    self._answer_sent.clear()
                    continue
                raise SlowRequestError(
                    "no line came within {timeout_s:g} s; end the request after the last line.", timeout_s=timeout_s
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client closed the connection before its stream was answered.")
            if more:
                self._chunks.put_nowait(message.get("body", b""))
                if not (more := message.get("more_body", False)):
                    self._chunks.put_nowait(None)
                if (ahead := self._chunks.qsize() - READ_AHEAD) >= 0:
                    self._chunk_taken.clear()
                    with suppress(TimeoutError):  # only reading detects a client that has left, so it continues slowly
                        await asyncio.wait_for(self._chunk_taken.wait(), 1 + ahead)

    async def _cut(self, group: asyncio.TaskGroup) -> None:
        """Starts a request for each line that is not blank."""
        line, size = bytearray(), self._state.settings.max_body_bytes + 1  # a line that is too long keeps one byte too many, and is refused
        while (chunk := await self._chunks.get()) is not None:
            self._chunk_taken.set()
            first, *others = LINE_ENDS.split(chunk)
            line += first[: size - len(line)]
            if others:
                for whole in filter(bytes.strip, [bytes(line), *others[:-1]]):
                    await self._start(whole[:size], group)
                line = bytearray(others[-1][:size])
        if line.strip():
            await self._start(bytes(line), group)
        self._answers.put_nowait((None, 0))

    async def _start(self, line: bytes, group: asyncio.TaskGroup) -> None:
        """Starts the request of a line when there is room for it."""
        min_weight = MAX_WEIGHT // self._state.settings.max_stream_requests
        while self._weight + (weight := max(min_weight, len(line), self._last_answer_bytes // ANSWER_SHARE)) > MAX_WEIGHT and self._weight:
            self._answer_sent.clear()
            await self._answer_sent.wait()
        self._lines += 1
        self._weight += weight
        self._answers.put_nowait((group.create_task(self._answer(line, self._lines)), weight))

    async def _write(self, send: Send) -> None:
        """Sends the answers; a client that reads slowly also slows the reading of its lines."""
        more = True
        while more:
            task, weight = await self._answers.get()
            more = task is not None
            answer = b"" if task is None else await task + b"\n"
            if self.request.status == 0:
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": [(b"content-type", MEDIA_TYPE.encode())]})
            await send({"type": "http.response.body", "body": answer, "more_body": more})
            self._weight -= weight
            self._answer_sent.set()

    async def _answer(self, line: bytes, number: int) -> bytes:
        """Returns the answer to a line as JSON, or its error in the usual JSON shape; counts both."""
        start, state, request = time.perf_counter(), self._state, self.request
        labels, status = (self.route.task or UNKNOWN, UNKNOWN), CLIENT_GONE
        try:
            request.auth.check(Access.KEY, request.scope["headers"])  # again, because a stream may have no end
            if len(line) > state.settings.max_body_bytes:
                raise TooLargeError(
                    "the line has more than {max_body_bytes} bytes; send less in one line; the operator can raise --max-body-bytes.",
                    max_body_bytes=state.settings.max_body_bytes,
                )
            if len(line) > LARGE_BYTES:
                await self.turns.wait()
            call = self.route.read_call(line, request)  # it looks the model up for each line, because it can be reloaded during the stream
            labels = (call.task, call.model.name)
            prediction = await self._predict(call)
            if prediction.answer_bytes > LARGE_BYTES:
                await self.turns.wait()
            body, status = to_json(call.answer(prediction)), HTTPStatus.OK
            self._last_answer_bytes = len(body)
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            if isinstance(error, BertServeError):
                error.message = f"line {number}: {error.message}"
            refusal = error_answers.response(error, request.id)
            body, status = bytes(refusal.body), refusal.status_code
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self.error_log.write(error, request.log_fields())
        finally:
            state.metrics.requests_of(*labels, status).inc()
            if labels[1] != UNKNOWN:
                state.metrics.model(*labels).request_seconds.observe(time.perf_counter() - start)
        return body

    async def _predict(self, call: Call) -> Prediction:
        """Returns the prediction. A refused line waits and asks again, until it has waited `timeout_s` seconds.

        Raises:
            RefusedError: The line was still refused after that time.
        """
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                return await call.predict(self.timeout_s, counts_refusals=False)
            except RefusedError as error:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise
                # each attempt may tokenize the line again
                await asyncio.sleep(max(MIN_RETRY_S, min(error.retry_after_s, left_s)))
