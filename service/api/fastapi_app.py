"""The application of FastAPI, which serves the routes that run no models; its OpenAPI description, and the page that shows it."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from bertserve.service import __version__
from bertserve.service.api import error_responses, playground
from bertserve.service.api.formats import cohere, hugging_face, kserve, open_inference, openai, tei
from bertserve.service.api.request import REQUEST_KEY
from bertserve.service.api.routing import INFERENCE, OTHER_CLIENTS, GuardedRoute, InferenceRoute, file_route
from bertserve.service.api.service_routes import service_routes
from bertserve.service.app_state import AppState
from bertserve.service.auth import Access
from bertserve.service.body.json_text import to_json

FORMATS = (hugging_face, open_inference, kserve, openai, cohere, tei)  # each has the function `routes`
DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

For a list of inputs, the answer is a list. Errors have one shape, `{"error", "error_type", "request_id"}`; below `/v1`, `error` is
an object in OpenAI's format. Every answer has the header `x-request-id`. The answer of a model also has `x-model` and
`server-timing`; `x-truncated` and `X-HF-Warning` say when text was cut."""
# the order of the page, with the most used ones first
TAGS = [
    {"name": INFERENCE, "description": "Send texts and get predictions, in the wire format of the Hugging Face Inference API."},
    {"name": OTHER_CLIENTS, "description": "The same models in the formats of other APIs, for existing clients."},
    {"name": "open inference", "description": "Metadata and probes of the Open Inference Protocol."},
    {"name": "models", "description": "The loaded models, and which model answers on which path."},
    {"name": "health", "description": "Probes and metrics."},
]
_SCRIPT, _STYLE, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"  # files of the page, below _STATIC
_STATIC = "docs/static"
_TYPES = {_SCRIPT: "text/javascript; charset=utf-8", _STYLE: "text/css; charset=utf-8", _ICON: "image/png"}


class ErrorBody(BaseModel):
    """An error: its kind, and one sentence that says what is wrong and what to change; an object below `/v1`."""

    error: str | dict[str, Any]
    error_type: str
    request_id: str


def create_fastapi(state: AppState) -> FastAPI:
    """Returns the application with all routes. It serves documents, models, probes and metrics."""
    root_path = state.settings.root_path

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.start()
        yield
        await state.stop(0)

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
    for wire_format in FORMATS:
        app.router.routes.extend(wire_format.routes())
    app.router.routes.extend([*service_routes(state), *playground.playground_routes(root_path), *_docs_routes()])
    app.add_exception_handler(Exception, _respond_to_error)
    _add_description(app, requires_key=state.auth.requires_key)
    return app


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Responds to an error that left FastAPI. FastAPI raises it again afterwards, and then `Application` logs it."""
    return error_responses.response(error, request.scope[REQUEST_KEY].id, request.scope["route"].error_format)


def _docs_routes() -> list[GuardedRoute]:
    """Returns the routes of the OpenAPI document and of the page `/docs`. The page works offline: an installed package has its files."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="bertserve",
        swagger_js_url=f"{_STATIC}/{_SCRIPT}",
        swagger_css_url=f"{_STATIC}/{_STYLE}",
        swagger_favicon_url=f"{_STATIC}/{_ICON}",
    )

    async def document(request: Request) -> Response:
        return Response(await asyncio.to_thread(lambda: to_json(request.app.openapi())), media_type="application/json")

    files = resources.files("fastapi_swagger.resources")
    return [
        GuardedRoute("/openapi.json", document, access=Access.PUBLIC, include_in_schema=False),
        file_route("/docs", bytes(page.body), {"content-type": "text/html; charset=utf-8"}),
        *(
            file_route(f"/{_STATIC}/{name}", files.joinpath(name).read_bytes(), {"content-type": kind, "cache-control": "max-age=3600"})
            for name, kind in _TYPES.items()
        ),
    ]


def _add_description(app: FastAPI, *, requires_key: bool) -> None:
    """Adds the schemas of bodies to the result of `app.openapi()`, and the key if callers need one."""
    describe_routes = app.openapi

    def openapi() -> dict[str, Any]:
        schema = describe_routes()
        kinds = dict.fromkeys([ErrorBody, *(body for route in app.routes if isinstance(route, InferenceRoute) for body in route.bodies)])
        modes = [(kind, "validation") for kind in kinds]
        _, bodies = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        schema["components"]["schemas"].update(bodies["$defs"])
        if requires_key:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        return schema

    app.openapi = functools.cache(openapi)  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
