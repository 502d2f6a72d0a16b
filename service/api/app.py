"""The application: the endpoint for all requests, and FastAPI for those that run no models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from bertserve.service import __version__
from bertserve.service.api import errors, playground
from bertserve.service.api.admin import routers as admin_routers
from bertserve.service.api.auth import Authenticator, check_declared
from bertserve.service.api.endpoint import Endpoint
from bertserve.service.api.openapi import TAGS, add_description, docs_router, inference_routes
from bertserve.service.api.request import REQUEST
from bertserve.service.errors import MethodNotAllowedError, NotFoundError, Sent
from bertserve.service.models.build import AppState
from bertserve.service.tasks.catalog import TASKS

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

For a list of inputs, the answer is a list. Errors have one shape, `{"error", "error_type", "request_id"}`. Every answer has the header
`x-request-id`. The answer of a model also has `x-model` and `server-timing`; `x-truncated` and `X-HF-Warning` say when
text was cut."""
_METHOD_NOT_ALLOWED = 405
_HEADERS_OF_ANSWERS = ("x-request-id", "x-model", "server-timing", "x-truncated", "x-windows", "x-hf-warning", "retry-after")


def create_app(
    state: AppState,
    *,
    auth: Authenticator | None = None,
    log_access: bool = False,
    log_probes: bool = False,
    root_path: str = "",
    cors_origins: Sequence[str] = (),
    sends_request_id: bool = True,
) -> ASGIApp:
    """Returns the application; its inference threads run from startup to shutdown.

    Args:
        state: The models, metrics and limits.
        auth: Admits requests; if None, no route needs a key, and model management is disabled.
        log_access: Whether to log a line for each request that is not a probe or a scrape.
        log_probes: Whether to log probes and scrapes too.
        root_path: Path prefix of the proxy; a request's path may have it or not.
        cors_origins: Origins whose pages may read answers.
        sends_request_id: Whether the application adds the header `x-request-id`; a server around it may add it instead.
    """
    auth = auth or Authenticator()
    fastapi = create_fastapi(state, root_path=root_path, asks_for_key=auth.keys is not None)
    app = Endpoint(
        state,
        fastapi,
        auth=auth,
        log_access=log_access,
        log_probes=log_probes,
        root_path=root_path,
        sends_request_id=sends_request_id,
    )
    if not cors_origins:
        return app
    # outermost, because a browser sends its preflight request without a key
    return CORSMiddleware(
        app, allow_origins=cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=_HEADERS_OF_ANSWERS
    )


def create_fastapi(state: AppState, *, root_path: str = "", asks_for_key: bool = False) -> FastAPI:
    """Returns the application with all routes. It serves documents, models, probes, metrics and unknown paths.

    Raises:
        TypeError: A route declares no access.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.scheduler.start()
        state.utilization.start()
        yield
        state.utilization.stop()
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
    app.router.redirect_slashes = False  # the redirect would go to a host that the caller chose in `Host`
    app.router.routes.extend(inference_routes())
    for router in (
        *admin_routers(state),
        playground.router(root_path),
        docs_router(),
    ):
        app.router.routes.extend(router.routes)
    check_declared(app.routes)
    app.add_exception_handler(HTTPException, _translate)
    app.add_exception_handler(Exception, _answer_error)
    add_description(app, root_path=root_path, asks_for_key=asks_for_key)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answers an error that left FastAPI. FastAPI raises it again afterwards, and then `Endpoint` logs it."""
    return errors.response(error, request.scope[REQUEST].id, request.scope["path"])


async def _translate(request: Request, error: Exception) -> Response:
    """Turns the router's own errors into errors of this service."""
    assert isinstance(error, HTTPException)
    if error.status_code == _METHOD_NOT_ALLOWED:
        # a path can have several routes, and the router names only the methods of the first one
        methods = [
            m for m in ("GET", "POST") if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in request.app.routes)
        ]
        allowed = ", ".join(methods)
        raise MethodNotAllowedError(
            "`{path}` takes {allowed}, not {method}; see /docs.",
            path=Sent(request.url.path),
            method=Sent(request.method),
            allowed=allowed,
        )
    raise _no_such_path(request)


def _no_such_path(request: Request) -> NotFoundError:
    """Returns the error for an unknown path."""
    path: str = request.scope["path"]
    bare = path.rstrip("/")
    if bare != path and any(route.matches({**request.scope, "path": bare})[0] is not Match.NONE for route in request.app.routes):
        return NotFoundError("there is no path `{path}`; leave out the slash at its end: `{bare}`.", path=Sent(path), bare=Sent(bare))
    tasks = ", ".join(f"/{spec.path}" for spec in TASKS.values())
    return NotFoundError("there is no path `{path}`; send a POST to {tasks} or /models/NAME, see /docs.", path=Sent(path), tasks=tasks)
