"""Application: the outermost ASGI application. It finds the route of each request, and runs models itself.

FastAPI describes all routes, and its routes serve all requests except to models: there, its telemetry, body limit, exit stacks and
dependencies would take two fifths of the event loop's time for a short text (bench/results/2026-11-21-with-memory-arena.md).
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import chain

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bertserve.service.api import error_responses, playground
from bertserve.service.api.error_responses import ErrorFormat, ErrorLog
from bertserve.service.api.formats import cohere, hugging_face, kserve, open_inference, openai, tei
from bertserve.service.api.jsonl import LINES_TYPES, LineStream
from bertserve.service.api.open_requests import OpenRequests
from bertserve.service.api.openapi import docs_routes
from bertserve.service.api.receiving import read_body, until_disconnect
from bertserve.service.api.request import JSON_LENGTH_HEADER, LARGE_BYTES, REQUEST_KEY, RequestContext
from bertserve.service.api.routing import GuardedRoute, InferenceRoute, RouteTable
from bertserve.service.api.service_routes import service_routes
from bertserve.service.app_state import AppState
from bertserve.service.errors import BertServeError, HttpError
from bertserve.service.metrics import UNKNOWN

FORMATS = (hugging_face, open_inference, kserve, openai, cohere, tei)  # each module defines the function `routes`
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_EXPOSED = ("x-request-id", "x-model", "server-timing", "x-truncated", "x-windows", "x-hf-warning", "retry-after")


class Application:
    """Serves every request: sets its id, finds its route, turns errors into responses, counts and logs."""

    def __init__(self, state: AppState, *, sends_request_id: bool = True) -> None:
        """Creates the application. Its startup starts inference threads; `sends_request_id` is false if the server sends the id."""
        self._state = state
        self._sends_request_id = sends_request_id
        self._fastapi = create_fastapi(state)
        self._routes = RouteTable(self._fastapi.routes)
        self._errors = ErrorLog()
        self._turns = asyncio.Lock()
        self._open_requests = OpenRequests(state.settings)
        self._ids = random.Random()  # noqa: S311 - ids only tell requests apart, they protect nothing
        self._app: ASGIApp = self._respond
        # outside of the check of keys, because a browser sends its preflight request without a key
        if origins := state.settings.cors_origin:
            exposed = (*_EXPOSED, JSON_LENGTH_HEADER.decode())
            self._app = CORSMiddleware(
                self._respond, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._fastapi(scope, receive, send)
            return
        request = scope[REQUEST_KEY] = self._begin(scope, send)
        try:
            await self._app(scope, receive, request.send)
        finally:
            settings = self._state.settings
            request.record_end(logs=settings.access_log and (settings.log_probes or not self._routes.is_probe(scope)))
            del scope[REQUEST_KEY]  # it refers to the scope, which an idle connection keeps

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends exactly one response, also after an error."""
        request: RequestContext = scope[REQUEST_KEY]
        try:
            route = self._routes.match(scope)
            request.key, is_sufficient = self._state.auth.identify(route.access, scope["headers"])
            if not is_sufficient:
                raise HttpError(HTTPStatus.FORBIDDEN, "the key `{key}` cannot change models; send an admin key.", key=request.key)
            if isinstance(route, InferenceRoute):
                self._open_requests.admit(request.key)
                try:
                    await self._serve(route, request, receive, send)
                finally:
                    self._open_requests.release(request.key)
            else:
                await AsyncExitStackMiddleware(route.handle)(scope, receive, send)  # as FastAPI calls its routes
        except Exception as error:  # noqa: BLE001 - the process boundary of a request
            self._errors.write(error, request.log_fields())
            if request.status == 0:
                await error_responses.error_response(error, request.id, _error_format(scope))(scope, receive, send)

    def refuse(self, error: BertServeError, is_counted: bool) -> Response:
        """Returns the response to what the server refuses itself; counts and logs it if the application never sees the request."""
        request_id = f"{self._ids.getrandbits(128):032x}"
        if is_counted:
            self._state.metrics.http_requests_by_status(error.status).inc()
            self._errors.write(error, {"request_id": request_id, "method": "-", "path": "-"})
        response = error_responses.error_response(error, request_id)
        response.headers.update({"x-request-id": request_id, "connection": "close"})
        return response

    def _begin(self, scope: Scope, send: Send) -> RequestContext:
        # the configured path, or the path at which another application mounts this one
        root_path = self._state.settings.root_path or scope.get("root_path", "")
        scope["root_path"] = ""  # the router would remove it a second time
        if root_path and f"{scope['path']}/".startswith(f"{root_path}/"):
            scope["path"] = scope["path"][len(root_path) :] or "/"
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"")
        # not uuid4: it reads the system's entropy and releases the GIL, and with busy threads it takes long to get the GIL back
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else b"%032x" % self._ids.getrandbits(128)
        request = RequestContext(scope, send, headers, request_id.decode(), self._state, self._turns)
        if self._sends_request_id:
            request.response_headers.append((b"x-request-id", request_id))
        tracer = self._state.tracer
        if tracer is not None and not self._routes.is_probe(scope):
            trace = request.trace = tracer.start_request_span(scope["headers"], request.start)
            # tells the caller its trace in a header that scripts of a page can read; `traceresponse` is only a draft
            request.response_headers.append((b"server-timing", b'traceparent;desc="%s"' % trace.traceparent.encode()))
        return request

    async def _serve(self, route: InferenceRoute, request: RequestContext, receive: Receive, send: Send) -> None:
        """Answers an admitted request that runs models."""
        scope, settings = request.scope, self._state.settings
        content_type = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_stream = route.streams and content_type in LINES_TYPES
        if not is_stream:  # each line of a stream counts as a request
            request.task_label, request.model_label = route.task or UNKNOWN, UNKNOWN
        request.check_head()
        timeout_s = request.timeout_s()
        model = request.named_model if scope["path_params"] else None
        if is_stream:
            await LineStream(route, request, timeout_s, self._errors).respond(receive, send)
            return
        if model is not None:
            request.task_label, request.model_label = model.task, model.name
        raw = await read_body(receive, request.headers, limit=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        if len(raw) > LARGE_BYTES:
            await request.take_turn()
        call = route.read_call(raw, request)
        del raw  # the body is not needed during inference
        request.task_label, request.model_label = call.task, call.model.name
        trace = request.trace if request.trace is not None and request.trace.is_recording else None
        prediction, body, body_headers = await until_disconnect(call.run(request, timeout_s, trace), receive)
        request.prediction = prediction
        headers = [(b"content-length", b"%d" % len(body)), *body_headers, *call.headers(prediction)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _error_format(scope: Scope) -> ErrorFormat:
    """Returns the format of a request's errors: its route's format, or the format of clients that use such a path."""
    if isinstance(route := scope.get("route"), GuardedRoute):
        return route.error_format
    return openai.error_object if scope["path"].startswith(openai.BASE_PATH) else error_responses.error_text


def create_fastapi(state: AppState) -> FastAPI:
    """Returns the application with all routes."""
    root_path = state.settings.root_path

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.start()
        yield
        await state.stop(0)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    routes = [*chain.from_iterable(wire_format.routes() for wire_format in FORMATS), *service_routes()]
    pages = [*playground.playground_routes(root_path), *docs_routes(routes, root_path, requires_key=state.auth.requires_key)]
    app.router.routes.extend([*routes, *pages])
    return app
