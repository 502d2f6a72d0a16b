"""The application: the request middleware around the paths that run models, and FastAPI behind them for everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from service import __version__
from service.errors import MethodNotAllowedError, NotFoundError
from service.http import errors
from service.http.access import Access
from service.http.admin import router
from service.http.inference import InferenceRouter
from service.http.middleware import REQUEST_ID, RequestMiddleware
from service.http.openapi import add_docs, documented
from service.serving.build import AppState

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

A list in is a list out. Errors have one shape, `{"error", "error_type", "request_id"}`. Every answer has the headers
`x-request-id`, `x-model` and `server-timing`; `x-truncated` and `X-HF-Warning` say when text was cut."""
_METHOD_NOT_ALLOWED = 405


def create_app(state: AppState, *, access: Access | None = None, log_access: bool = False) -> ASGIApp:
    """Returns the application; its lanes run from its start-up to its shutdown.

    Args:
        state: What it answers from.
        access: Says who may call what; None lets everyone in.
        log_access: Whether to log a line for each request.
    """
    router_in_front = InferenceRouter(state, create_fastapi(state))
    return RequestMiddleware(router_in_front, metrics=state.metrics, access=access or Access(), log_access=log_access)


def create_fastapi(state: AppState) -> FastAPI:
    """Returns what answers all requests but those that run models: documents, models, probes, metrics and wrong paths."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.scheduler.start()
        yield
        await state.scheduler.stop(0)

    app = FastAPI(title="bertserve", version=__version__, description=DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # to an address made of the caller's own `Host`
    app.include_router(documented())
    app.include_router(router(state))
    app.add_exception_handler(HTTPException, _translate)
    app.add_exception_handler(Exception, _answer_error)
    add_docs(app)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answers an error that left FastAPI. FastAPI raises it again afterwards, so that the middleware logs it."""
    return errors.response(error, request.scope[REQUEST_ID])


async def _translate(request: Request, error: Exception) -> Response:
    """Turns the router's own errors into ours."""
    assert isinstance(error, HTTPException)
    if error.status_code == _METHOD_NOT_ALLOWED:
        # a path may have several routes, and the router names the methods of the first one only
        methods = [
            m for m in ("GET", "POST") if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in request.app.routes)
        ]
        allowed = ", ".join(methods)
        raise MethodNotAllowedError(f"`{request.url.path[:64]}` takes {allowed}, not {request.method}; see /docs.", allowed=allowed)
    raise NotFoundError(f"there is no path `{request.url.path[:64]}`; see /docs.")
