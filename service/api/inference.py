"""The routes that run models: they turn a body into requests of a task, and a prediction into an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import QueryParams
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from bertserve.service.api.auth import Endpoint
from bertserve.service.api.call import Call, Content, Incoming, RequestInputs
from bertserve.service.api.errors import GONE
from bertserve.service.api.jsonl import MEDIA_TYPES, LineAnswerer, LineStream
from bertserve.service.api.middleware import HEADERS, LABELS, PREDICTION, REQUEST_ID, recorded_trace
from bertserve.service.api.responses import content_of
from bertserve.service.api.routes import Route
from bertserve.service.api_keys import Access
from bertserve.service.errors import (
    BertServeError,
    ClientGoneError,
    ContentEncodingError,
    InvalidValueError,
    Sent,
    TooLargeError,
)
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.build import AppState
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.batch import MAX_SPANS, ReadSpan

TIMEOUT_HEADER = "x-request-timeout-ms"
_TIMEOUT = TIMEOUT_HEADER.encode()


class InferenceEndpoint(Endpoint):
    """A route that runs models.

    FastAPI documents it, and names its method in a 405, but does not run it: FastAPI's telemetry, body limit, exit stacks and
    dependencies take two fifths of the event loop's time for a short text (bench/results/2026-11-21-with-memory-arena.md).
    """

    access = Access.KEY

    def __init__(
        self, route: Route, answer: Callable[[Route, Scope, Receive, Send], Coroutine[Any, Any, None]], **description: Any
    ) -> None:
        """Creates it; `description` has FastAPI's arguments for OpenAPI, and FastAPI never calls the function of this route."""
        self.run = partial(answer, route)  # type: ignore[method-assign]
        super().__init__(route.path, lambda: None, methods=["POST"], summary=route.summary, response_model=None, **description)


class DirectRoutes:
    """Matches POST requests to the routes that run models; FastAPI gets all other requests."""

    def __init__(self, routes: Sequence[InferenceEndpoint], otherwise: ASGIApp) -> None:
        """Takes the routes; a fixed path has precedence over one with a name. `otherwise` gets all other requests and the lifespan."""
        self._fixed = {route.path: route for route in routes if "{" not in route.path}
        self._named = [route for route in routes if "{" in route.path]
        self._otherwise = otherwise

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves one request."""
        app = self._otherwise
        if scope["type"] == "http" and scope["method"] == "POST":
            # the scope gets the route and its parameters, as from FastAPI's router
            if (fixed := self._fixed.get(scope["path"])) is not None:
                scope["route"], scope["path_params"] = fixed, {}
                app = fixed.handle
            else:
                for route in self._named:
                    match, parameters = route.matches(scope)
                    if match is Match.FULL:
                        scope.update(parameters)
                        app = route.handle
                        break
        return app(scope, receive, send)


class Inference:
    """Answers the requests of all routes that run models."""

    def __init__(self, state: AppState) -> None:
        """Uses the models and limits of `state`."""
        self._state = state

    async def answer(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request of a route, or each line of a stream."""
        if route.streams and scope[HEADERS].get(b"content-type", b"").partition(b";")[0].strip().lower() in MEDIA_TYPES:
            await self._stream(scope, receive, route)(send)
            return
        content, headers = await self._respond(scope, receive, route)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content.body})

    async def _respond(self, scope: Scope, receive: Receive, route: Route) -> tuple[Content, list[tuple[bytes, bytes]]]:
        """Returns the content and the headers of the answer to a request, whose path may name a model."""
        headers, registry = scope[HEADERS], self._state.registry
        scope[LABELS] = (route.task or UNKNOWN, UNKNOWN)
        path_params = scope["path_params"]
        named = registry.get(path_params["name"]) if path_params else None
        if named is not None:
            scope[LABELS] = (named.task, named.name)
        if scope["query_string"]:
            raise _no_query(scope)
        raw = await read_raw(receive, headers, self._state.max_body_bytes)
        call = route.read(Incoming(raw, headers, named, registry, self._state.limits, scope[REQUEST_ID]))
        del raw  # the body is not needed during inference
        model, body = call.model, call.body
        scope[LABELS] = (call.task, model.name)
        timeout_s = self._timeout_s(headers)
        if call.timeout_s is not None:
            timeout_s = self._checked(call.timeout_s)
        requests = body.requests(model.bundle.manifest)
        try:
            prediction = await unless_disconnected(
                model.predict(requests, timeout_s=timeout_s, task=call.task, trace=recorded_trace(scope)), scope, receive
            )
        except BertServeError as error:
            error.name_input(many=body.is_list, subject=body.subject)
            raise
        scope[PREDICTION] = prediction
        content = content_of(call, prediction)
        answer_headers = _headers(call, content, prediction)
        prediction.results = []  # the scope keeps the prediction until the answer is sent, because of its times
        return content, answer_headers

    def _stream(self, scope: Scope, receive: Receive, route: Route) -> LineStream:
        """Returns the stream that answers a request of many lines; each line counts as a request, the stream itself does not."""
        headers, name = scope[HEADERS], scope["path_params"].get("name")
        if name is not None:
            self._state.registry.get(name)
        if scope["query_string"]:
            raise _no_query(scope)
        _check_encoding(headers)
        timeout_s = self._timeout_s(headers)

        def incoming(raw: bytes) -> Incoming:
            # the model is looked up for each line, because it can be reloaded during the stream
            named = None if name is None else self._state.registry.get(name)
            return Incoming(raw, headers, named, self._state.registry, self._state.limits, request_id=scope[REQUEST_ID])

        line = LineAnswerer(self._state, route, incoming, scope, timeout_s=timeout_s)
        max_requests, max_bytes = self._state.max_stream_requests, self._state.max_body_bytes
        return LineStream(scope, receive, line.answer, max_requests=max_requests, max_bytes=max_bytes)

    def _timeout_s(self, headers: Mapping[bytes, bytes]) -> float:
        value = headers.get(_TIMEOUT)
        if value is None:
            return self._state.timeout_ms / 1000
        if not (re.fullmatch(b"[0-9]{1,9}", value) and 1 <= int(value) <= self._state.max_timeout_ms):
            raise InvalidValueError(
                "the header `{timeout_header}` is `{value}`; it must be a whole number from 1 to {max_timeout_ms}.",
                timeout_header=TIMEOUT_HEADER,
                value=Sent(value.decode("latin-1")),
                max_timeout_ms=self._state.max_timeout_ms,
            )
        return int(value) / 1000

    def _checked(self, timeout_s: float) -> float:
        """Returns the deadline from a body, after a check of its range."""
        if timeout_s * 1000 > self._state.max_timeout_ms:
            raise InvalidValueError(
                "the timeout in the body is {timeout_s:.0f} ms, and {max_timeout_ms} ms are allowed; make it smaller.",
                timeout_s=Sent(timeout_s * 1000),
                max_timeout_ms=self._state.max_timeout_ms,
            )
        return timeout_s


def _no_query(scope: Scope) -> InvalidValueError:
    """Returns the error for a query string, which would otherwise have no effect."""
    name = next(iter(QueryParams(scope["query_string"])), "")
    where = "set `model` in the body, or use the path /models/NAME" if name == "model" else "put it into the body"
    return InvalidValueError("the URL has the query parameter `{name}`, but this path takes none; {where}.", name=Sent(name), where=where)


def _headers(call: Call, content: Content, prediction: Prediction) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an answer."""
    warnings = list(_warnings(prediction, call.body)) if prediction.warnings else []
    headers = [
        (b"content-length", b"%d" % len(content.body)),
        (b"content-type", content.media_type.encode()),
        (b"x-model", call.model.name.encode()),
        (
            b"server-timing",
            b"tokenize;dur=%.3f, queue;dur=%.3f, inference;dur=%.3f, decode;dur=%.3f"
            % (prediction.tokenize_s * 1000, prediction.queue_s * 1000, prediction.inference_s * 1000, prediction.decode_s * 1000),
        ),
    ]
    if prediction.truncated:
        headers.append((b"x-truncated", b"%d" % len(prediction.truncated)))
        count = f"{len(prediction.truncated)} of {len(prediction.results)} {call.body.subject} " if call.body.is_list else ""
        warnings.append(
            f"truncation; {count}cut to the model's {call.model.bundle.manifest.tokenizer.max_length} tokens: "
            f"{_named(prediction.truncated, call.body)}"
        )
    if prediction.read:
        headers.append((b"x-windows", _escaped(_windows(prediction.read))))
    headers.extend((name.encode(), _escaped(value)) for name, value in content.headers.items())
    # one header per warning, because the official client expects that
    headers.extend((b"x-hf-warning", _escaped(warning)) for warning in warnings)
    return headers


def _warnings(prediction: Prediction, body: RequestInputs) -> Iterator[str]:
    """Yields each warning once, with its inputs unless it applies to all."""
    about: dict[str, list[int]] = {}
    for index, warning in prediction.warnings:
        about.setdefault(warning, []).append(index)
    for warning, indices in about.items():
        yield warning if len(indices) == len(prediction.results) else f"{warning}: {_named(indices, body)}"


def _named(indices: Sequence[int], body: RequestInputs) -> str:
    """Returns inputs by the names that the caller knows: `inputs` for a single one, `inputs[i]` for items of a list."""
    if not body.is_list:
        return body.subject
    return ", ".join(f"{body.subject}[{index}]" for index in indices[:10]) + (", ..." if len(indices) > 10 else "")


def _windows(read_spans: Sequence[ReadSpan]) -> str:
    """Returns the spans that the model read of an input, such as `0-1843, 1310-2950`; each has its text's name if there are two texts."""
    spans = [f"{span.field}{'=' if span.field else ''}{span.start}-{span.end}" for span in read_spans[:MAX_SPANS]]
    return ", ".join([*spans, "..."] if len(read_spans) > MAX_SPANS else spans)


def _escaped(value: str) -> bytes:
    """Returns a header's value in printable ASCII. Other characters are escaped, because tokens in a vocabulary may have newlines."""
    return value.encode() if value.isascii() and value.isprintable() else value.encode("unicode_escape")


def _check_encoding(headers: Mapping[bytes, bytes]) -> None:
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise ContentEncodingError(
            "the body's content encoding is `{encoding}`; send it uncompressed.", encoding=Sent(encoding.decode("latin-1"))
        )
    if b"content-length" not in headers:
        coding = headers.get(b"transfer-encoding", b"chunked")
        if coding.lower() != b"chunked":
            raise ContentEncodingError(
                "the body's transfer encoding is `{coding}`; send it uncompressed, in chunks or with its length.",
                coding=Sent(coding.decode("latin-1")),
            )


async def read_raw(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """Reads the body, and stops as soon as it exceeds the limit.

    Args:
        receive: The request's ASGI channel.
        headers: The request's headers, by name in lower case.
        limit: Maximum size of a body in bytes.
        reservation: Reserves the bytes of a large body once `UNCOUNTED_BYTES` are read: twice the bytes so far, at most the body's length.

    Raises:
        UnavailableError: The bytes of the body cannot be reserved.
        ContentEncodingError: The body is compressed.
        TooLargeError: The body exceeds the limit.
        ClientGoneError: The client disconnected before the end of the body.
    """
    _check_encoding(headers)
    declared = headers.get(b"content-length", b"0")
    size = int(declared) if declared.isdigit() else 0
    more = True
    chunks: list[bytes] = []
    if size <= limit:
        size = 0
        while more and size <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client closed the connection while it sent the body.")
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            more = message.get("more_body", False)
    if size > limit:
        raise TooLargeError(
            "the body has {size} bytes or more and {limit} are allowed; send less at once; the operator can raise --max-body-bytes.",
            size=size,
            limit=limit,
        )
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


T = TypeVar("T")

# Other servers than bert-serve's do not call GONE. Most requests are answered sooner, and watching each one would cost more than it saves.
WATCH_AFTER_S = 0.1


async def unless_disconnected(work: Awaitable[T], scope: Scope, receive: Receive) -> T:
    """Awaits work and cancels it when the client disconnects; the request's body must have been read to the end.

    Raises:
        ClientGoneError: The client disconnected first.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "called outside a task. This is a bug."
    watchers: list[asyncio.Task[None]] = []
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        cancel()

    scope[GONE] = cancel
    timer = loop.call_later(WATCH_AFTER_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGoneError("the client closed the connection before it was answered.") from None
    finally:
        del scope[GONE]  # it refers to the task, and the task to the scope
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()
