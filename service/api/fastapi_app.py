"""The application of FastAPI, which has all routes, and serves those that run no models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

from fastapi import FastAPI, Request
from starlette.responses import Response

from bertserve.service.api import error_responses, playground
from bertserve.service.api.formats import cohere, hugging_face, kserve, open_inference, openai, tei
from bertserve.service.api.openapi import docs_routes
from bertserve.service.api.request import REQUEST_KEY
from bertserve.service.api.service_routes import service_routes
from bertserve.service.app_state import AppState

FORMATS = (hugging_face, open_inference, kserve, openai, cohere, tei)  # each has the function `routes`


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
    app.add_exception_handler(Exception, _respond_to_error)
    return app


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Responds to an error that left FastAPI. FastAPI raises it again afterwards, and then `Application` logs it."""
    return error_responses.response(error, request.scope[REQUEST_KEY].id, request.scope["route"].error_format)
