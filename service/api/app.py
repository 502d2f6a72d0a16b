"""The application of FastAPI, which serves all requests that run no models."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from bertserve.service import __version__
from bertserve.service.api import error_answers, playground
from bertserve.service.api.admin import routers as admin_routers
from bertserve.service.api.openapi import TAGS, add_description, docs_router
from bertserve.service.api.request import REQUEST
from bertserve.service.api.routes import check_declared, inference_routes
from bertserve.service.engine.freed_memory import return_freed_memory
from bertserve.service.errors import CallerValue, MethodNotAllowedError, NotFoundError
from bertserve.service.models.build import AppState
from bertserve.service.tasks.catalog import TASKS

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

For a list of inputs, the answer is a list. Errors have one shape, `{"error", "error_type", "request_id"}`. Every answer has the header
`x-request-id`. The answer of a model also has `x-model` and `server-timing`; `x-truncated` and `X-HF-Warning` say when
text was cut."""


def create_fastapi(state: AppState, *, asks_for_key: bool = False) -> FastAPI:
    """Returns the application with all routes. It serves documents, models, probes, metrics and unknown paths.

    Raises:
        TypeError: A route declares no access.
    """
    root_path = state.settings.root_path

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.scheduler.start()
        state.utilization.start()
        stopped = threading.Event()
        threading.Thread(target=return_freed_memory, args=(stopped,), name="freed-memory", daemon=True).start()
        yield
        stopped.set()
        state.utilization.stop()
        await state.scheduler.stop(0)

    app = FastAPI(
        title="bertserve",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        servers=[{"url": root_path}] if root_path else None,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.router.redirect_slashes = False  # the redirect would go to a host that the caller chose in `Host`
    app.router.routes.extend(inference_routes())
    for router in (*admin_routers(state), playground.router(root_path), docs_router()):
        app.router.routes.extend(router.routes)
    check_declared(app.routes)
    app.add_exception_handler(HTTPException, _translate)
    app.add_exception_handler(Exception, _answer_error)
    add_description(app, asks_for_key=asks_for_key)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answers an error that left FastAPI. FastAPI raises it again afterwards, and then `Endpoint` logs it."""
    return error_answers.response(error, request.scope[REQUEST].id, request.scope["path"])


async def _translate(request: Request, error: Exception) -> Response:
    """Turns the router's own errors into errors of this service."""
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # a path can have several routes, and the router names only the methods of the first one
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
        not_allowed = MethodNotAllowedError("`{path}` takes only {allowed}; see /docs.", path=CallerValue(path), allowed=allowed)
        not_allowed.headers = {"Allow": allowed}
        raise not_allowed
    tasks = ", ".join(f"/{spec.path}" for spec in TASKS.values())
    raise NotFoundError(
        "there is no path `{path}`; send a POST to {tasks} or /models/NAME, without a slash at the end; see /docs.",
        path=CallerValue(path),
        tasks=tasks,
    )
