"""The application: the request middleware around the paths that run models, and FastAPI behind them for everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from bertserve.service import __version__
from bertserve.service.errors import MethodNotAllowedError
from bertserve.service.http import errors, open_inference, playground
from bertserve.service.http.admin import routers as admin_routers
from bertserve.service.http.auth import Authenticator, Endpoint, check_declared
from bertserve.service.http.inference import DirectRoutes, Inference, InferenceEndpoint
from bertserve.service.http.middleware import REQUEST_ID, RequestMiddleware
from bertserve.service.http.openapi import TAGS, add_description, docs_router, inference_routes
from bertserve.service.http.paths import no_such_path
from bertserve.service.serving.build import AppState

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

A list in is a list out. Errors have one shape, `{"error", "error_type", "request_id"}`. Every answer has the headers
`x-request-id`, `x-model` and `server-timing`; `x-truncated` and `X-HF-Warning` say when text was cut."""
_METHOD_NOT_ALLOWED = 405
_HEADERS_OF_ANSWERS = ("x-request-id", "x-model", "server-timing", "x-truncated", "x-windows", "x-hf-warning", "retry-after")


def create_app(
    state: AppState,
    *,
    auth: Authenticator | None = None,
    log_access: bool = False,
    root_path: str = "",
    cors_origins: Sequence[str] = (),
    sends_request_id: bool = True,
) -> ASGIApp:
    """Returns the application; its lanes run from its start-up to its shutdown.

    Args:
        state: What it answers from.
        auth: Admits requests; with None, all routes need no key and model management is disabled.
        log_access: Whether to log a line for each request.
        root_path: Path below which a proxy offers it; a path may begin with it or not.
        cors_origins: Origins whose pages may read answers.
        sends_request_id: Whether answers get the header `x-request-id` here; a server around it may add it.
    """
    auth = auth or Authenticator()
    running = inference_routes(Inference(state))
    fastapi = create_fastapi(state, running, root_path=root_path, asks_for_key=auth.keys is not None)
    app = RequestMiddleware(
        DirectRoutes(running, fastapi),
        metrics=state.metrics,
        auth=auth,
        log_access=log_access,
        root_path=root_path,
        tracer=state.tracer,
        sends_request_id=sends_request_id,
    )
    if not cors_origins:
        return app
    # around everything: a browser asks first, and without a key
    return CORSMiddleware(
        app, allow_origins=cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=_HEADERS_OF_ANSWERS
    )


def create_fastapi(
    state: AppState, running: Sequence[InferenceEndpoint] | None = None, *, root_path: str = "", asks_for_key: bool = False
) -> FastAPI:
    """Returns the application of all routes. It serves documents, models, probes, metrics and wrong paths.

    Args:
        state: What it answers from.
        running: The routes that run models.
        root_path: Path below which a proxy offers it.
        asks_for_key: Whether callers need a key.

    Raises:
        TypeError: A route declares no access.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.scheduler.start()
        state.saturation.start()
        yield
        state.saturation.stop()
        await state.scheduler.stop(0)

    app = FastAPI(
        title="bertserve",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.router.redirect_slashes = False  # to an address made of the caller's own `Host`
    app.router.routes.extend(inference_routes(Inference(state)) if running is None else running)
    for router in (
        *admin_routers(state),
        playground.router(root_path),
        *open_inference.routers(state),
        docs_router(state.registry),
    ):
        app.router.routes.extend(router.routes)
    check_declared(app.routes)
    app.add_exception_handler(
        HTTPException, partial(_translate, tuple(sorted({route.path for route in app.routes if isinstance(route, Endpoint)})))
    )
    app.add_exception_handler(Exception, _answer_error)
    add_description(app, state.registry, root_path=root_path, asks_for_key=asks_for_key)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answers an error that left FastAPI. FastAPI raises it again afterwards, so that the middleware logs it."""
    return errors.response(error, request.scope[REQUEST_ID], request.scope["path"])


async def _translate(paths: tuple[str, ...], request: Request, error: Exception) -> Response:
    """Turns the router's own errors into ours; `paths` are those of all routes."""
    assert isinstance(error, HTTPException)
    if error.status_code == _METHOD_NOT_ALLOWED:
        # a path may have several routes, and the router names the methods of the first one only
        methods = [
            m for m in ("GET", "POST") if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in request.app.routes)
        ]
        allowed = ", ".join(methods)
        raise MethodNotAllowedError(
            "`{path}` takes {allowed}, not {method}; see /docs.",
            path=request.url.path[:64],
            method=request.method,
            allowed=allowed,
        )
    raise no_such_path(request.scope["path"], paths)
