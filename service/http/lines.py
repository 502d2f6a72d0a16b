"""LineAnswerer: a line of a stream is a request of its own, in metrics and errors; only its wait for room is the service's, not the client's.

The lines of a stream together hold a limited share of the queue, so that other callers are served however fast a stream is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

from bertserve.service.errors import BertServeError, RefusedError, TooLargeError
from bertserve.service.http import errors
from bertserve.service.http.answers import content_of
from bertserve.service.http.error_log import ErrorLog
from bertserve.service.http.middleware import REQUEST_ID, of_request, recorded_trace
from bertserve.service.metrics import UNKNOWN
from bertserve.service.scheduling.share import SHARE_FULL, Share
from bertserve.service.serving.build import AppState
from bertserve.service.serving.model import Model
from bertserve.service.serving.prediction import Prediction
from bertserve.service.tracing.trace import Trace
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.routes import Route

MAX_TRACED_LINES = 128  # of a stream that is traced
RETRY_LEAST_S, RETRY_MOST_S = 0.02, 1.0
_OK, _GONE, _SERVER_ERROR = 200, 499, 500
SMALL_BYTES = 2**16  # of a body that is read at once


class LargeBodies:
    """Reads the bodies of all requests of a process: large ones one at a time, with a turn of the event loop after each.

    Parsing and validating a body of the largest size takes the event loop some 0.1 s. Many that are complete at the same time would be read
    one after the other before anything else runs, until the supervisor takes the worker for hung.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._turn = asyncio.Lock()

    async def read(self, route: Route, incoming: Incoming[Any]) -> Call[Any]:
        """Returns what a request of a route asks for, as `route.read` does."""
        if len(incoming.raw) <= SMALL_BYTES:
            return route.read(incoming)
        async with self._turn:
            try:
                return route.read(incoming)
            finally:
                await asyncio.sleep(0)


class LineAnswerer:
    """Answers the lines of one stream."""

    def __init__(
        self,
        state: AppState,
        route: Route,
        incoming: Callable[[bytes], Incoming[Model]],
        scope: Scope,
        error_log: ErrorLog,
        bodies: LargeBodies,
        *,
        timeout_s: float,
    ) -> None:
        """Creates it.

        Args:
            state: What to answer from.
            route: The stream's.
            incoming: Makes a request of a line; may raise NotFoundError.
            scope: The stream's.
            error_log: Where what the service fails at is logged. What callers do wrong has its place in the answers: a stream may have
                millions of lines.
            bodies: Reads lines, in turn with the bodies of other requests.
            timeout_s: Seconds until a line must have started, from when it was read, or from when the lines before it left room for it.
        """
        self._state = state
        self._route = route
        self._incoming = incoming
        self._scope = scope
        self._errors = error_log
        self._bodies = bodies
        self._timeout_s = timeout_s
        self._lines = 0
        self._share = Share()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def answer(self, line: bytes) -> bytes:
        """Returns the answer to a line as JSON, or its error in the one shape; either is counted."""
        start = time.perf_counter()
        trace = self._begin(start)
        labels, status = (self._route.task or UNKNOWN, UNKNOWN), _GONE
        try:
            if len(line) > self._state.max_body_bytes:
                raise TooLargeError(
                    "the line has more than {max_body_bytes} bytes; send less in one line, or raise --max-body-bytes.",
                    max_body_bytes=self._state.max_body_bytes,
                )
            call = await self._bodies.read(self._route, self._incoming(line))
            labels = (call.task, call.model.name)
            content = await content_of(call, await self._predict(call, trace))
            body, status = content.data, _OK
        except Exception as error:  # noqa: BLE001 - the process boundary of a line
            refusal = errors.response(error, self._scope[REQUEST_ID])
            body, status = bytes(refusal.body), refusal.status_code
            if status >= _SERVER_ERROR:
                self._errors.write(error, of_request(self._scope))
        finally:
            if trace is not None:
                said = {"bertserve.task": labels[0], "bertserve.model": labels[1], "bertserve.line.status": str(status)}
                trace.tracer.end(trace, time.perf_counter(), attributes=said, failed=status >= _SERVER_ERROR)
            self._state.metrics.requests_of(*labels, status).inc()
            self._let_one_continue()
            if labels[1] != UNKNOWN:
                self._state.metrics.model(*labels).request_seconds.observe(time.perf_counter() - start)
        return body

    def _let_one_continue(self) -> None:
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():  # it is if the line was given up
                turn.set_result(None)
                return

    def _begin(self, start: float) -> Trace | None:
        """Returns the trace of a line that is read now: those of the first of a stream are seen, for it may have millions."""
        stream = recorded_trace(self._scope)
        self._lines += 1
        if stream is None or self._lines > MAX_TRACED_LINES:
            return None
        return stream.tracer.begin_within(stream, "line", start)

    async def _predict(self, call: Call[Model], trace: Trace | None) -> Prediction:
        """Returns the prediction; while there is no room for it, it waits and asks again, up to the line's deadline."""
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        deadline = loop.time() + timeout_s
        requests = call.body.requests(call.model.bundle.manifest)
        while True:
            try:
                left_s = max(deadline - loop.time(), 0.0)
                return await call.model.predict(
                    requests, timeout_s=left_s, task=call.task, spec=call.spec, counts_refusals=False, trace=trace, share=self._share
                )
            except RefusedError as error:
                if error.reason == SHARE_FULL:
                    await self._wait_for_own_lines()
                    deadline = loop.time() + timeout_s
                    continue
                wait_s = min(max(error.retry_after_s, RETRY_LEAST_S), RETRY_MOST_S)
                if loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)
            except BertServeError as error:
                error.name_input(many=call.body.is_list, subject=call.body.subject)
                raise

    async def _wait_for_own_lines(self) -> None:
        """Waits until another line of the stream is answered, unless there is none. Each answer lets one line continue."""
        if self._share.jobs:
            self._waiting.append(turn := asyncio.get_running_loop().create_future())
            await turn
