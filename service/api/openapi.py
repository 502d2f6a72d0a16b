"""The OpenAPI description of the paths that run models, and the page that shows it."""

from __future__ import annotations

import asyncio
import functools
import operator
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

from bertserve.service.api import errors
from bertserve.service.api.auth import GuardedRoute
from bertserve.service.api.jsonl import MEDIA_TYPE
from bertserve.service.api.request import TIMEOUT_HEADER
from bertserve.service.api.routes import INFERENCE, OTHER_CLIENTS, InferenceRoute, Route, all_routes
from bertserve.service.api_keys import Access
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.json_text import to_json

ANYWHERE = (400, 401, 429, 431, 500, 503)  # statuses of any request
# in the order of the page: the most used ones first
TAGS = [
    {"name": INFERENCE, "description": "Send texts and get predictions, in the wire format of the Hugging Face Inference API."},
    {"name": OTHER_CLIENTS, "description": "The same models in the formats of other APIs, for existing clients."},
    {"name": "open inference", "description": "Metadata and probes of the Open Inference Protocol."},
    {"name": "models", "description": "The loaded models, and which model answers on which path."},
    {"name": "health", "description": "Probes and metrics."},
]
_NAME = re.compile(r"\{(\w+)\}")  # in a path
_SCRIPT, _STYLE, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"  # files of the page, below _STATIC
_STATIC = "docs/static"
_TYPES = {_SCRIPT: "text/javascript; charset=utf-8", _STYLE: "text/css; charset=utf-8", _ICON: "image/png"}


class ErrorBody(BaseModel):
    """An error: its kind, and one sentence that says what is wrong and what to change."""

    error: str
    error_type: str
    request_id: str


class OpenAIError(BaseModel):
    """The error in the shape that clients of OpenAI's API expect."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(BaseModel):
    """An error below `/v1`: its kind, and one sentence that says what is wrong and what to change."""

    error: OpenAIError
    error_type: str
    request_id: str


_ERRORS: tuple[type[BaseModel], ...] = (ErrorBody, OpenAIErrorBody)


def error_responses(*statuses: int, path: str = "") -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI description of a route's errors: these, and the errors of any request."""
    body = OpenAIErrorBody if errors.has_openai_shape(path) else ErrorBody
    # a reference instead of FastAPI's `model`, which would compile about a thousand validators at every start
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    return {status: {"content": content} for status in sorted({*statuses, *ANYWHERE})}


def inference_routes() -> list[InferenceRoute]:
    """Returns the routes that run models, each with its description."""
    return [InferenceRoute(route, **_described(route)) for route in all_routes()]


def endpoints(access: Access, **options: Any) -> APIRouter:
    """Returns a router for routes of one access, with further arguments of `APIRouter`."""
    route_class = type("GuardedRoute", (GuardedRoute,), {"access": access})
    return APIRouter(route_class=route_class, generate_unique_id_function=operation_id, **options)


def add_file(routes: APIRouter, path: str, content: bytes, headers: Mapping[str, str]) -> None:
    """Adds a route that answers with a file from memory: all clients share its bytes, and it needs no descriptor and no thread."""

    @routes.get(path)
    async def file() -> Response:
        return Response(content, headers=headers)


def docs_router() -> APIRouter:
    """Returns the routes of the OpenAPI document and of the page `/docs`. The page works offline: an installed package has its files."""
    routes = endpoints(Access.PUBLIC, include_in_schema=False)
    document = b""
    writing = asyncio.Lock()
    page_html = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="bertserve",
        swagger_js_url=f"{_STATIC}/{_SCRIPT}",
        swagger_css_url=f"{_STATIC}/{_STYLE}",
        swagger_favicon_url=f"{_STATIC}/{_ICON}",
        swagger_ui_parameters={"docExpansion": "none"},
    )
    # all tags except the first one are folded; a link to the first one opens it
    content = bytes(page_html.body).replace(
        b"<body>", b"<body><script>if (!location.hash) location.replace('#/%s')</script>" % INFERENCE.encode()
    )

    files = resources.files("fastapi_swagger.resources")
    for name, media_type in _TYPES.items():
        headers = {"content-type": media_type, "cache-control": "max-age=3600"}
        add_file(routes, f"/{_STATIC}/{name}", files.joinpath(name).read_bytes(), headers)

    @routes.get("/openapi.json")
    async def openapi_document(request: Request) -> Response:
        nonlocal document
        async with writing:
            document = document or await asyncio.to_thread(lambda: to_json(request.app.openapi()))
        return Response(document, media_type="application/json")

    @routes.get("/docs")
    async def page() -> Response:
        return HTMLResponse(content)

    return routes


def add_description(app: FastAPI, *, root_path: str = "", asks_for_key: bool = False) -> None:
    """Adds the schemas of bodies to the result of `app.openapi()`.

    Args:
        app: The application.
        root_path: Path prefix of the proxy.
        asks_for_key: Whether callers need a key; the page then has a field for it.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
            )
            named = dict.fromkeys((*_ERRORS, *(body for route in all_routes() for body in route.bodies)))
            modes = [(body, "validation") for body in named]
            _, bodies = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"].update(bodies["$defs"])
            _drop_fastapi_errors(schema)
            if root_path:
                schema["servers"] = [{"url": root_path}]
            if asks_for_key:
                schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema


def operation_id(route: APIRoute) -> str:
    """Returns the name of an operation in generated clients: its path in words, such as `classify` or `get_models_by_name_info`."""
    words = _NAME.sub(r"by_\1", route.path)
    words = "_".join(re.findall("[a-z0-9]+", words)) or "base_url"
    return words if "POST" in (route.methods or ()) else f"get_{words}"


def _described(route: Route) -> dict[str, Any]:
    """Returns the OpenAPI description of a route that reads the raw request."""
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}} if route.binary else {}
    lines: dict[str, Any] = {MEDIA_TYPE: {"schema": {"type": "string", "description": "JSON Lines."}}} if route.streams else {}
    responses = {
        200: {
            "model": functools.reduce(operator.or_, route.answers),
            "description": "A result, or a list of them: one for each input.",
            "content": binary | lines,
        },
        **error_responses(400, 404, 408, 413, 415, 422, 504, path=route.path),
    }
    references = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in route.bodies]
    parameter = {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "Milliseconds until the request must have started.",
    }
    path_params = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _NAME.findall(route.path)]
    json_body: dict[str, Any] = {"schema": references[0]}
    if len(route.bodies) > 1:
        json_body = {
            "schema": {"anyOf": references},
            "examples": {spec.path: {"summary": spec.title, "value": spec.body.example()} for spec in TASKS.values()},
        }
    extra = {
        "requestBody": {"required": True, "content": {"application/json": json_body} | binary | lines},
        "parameters": [*path_params, parameter],
    }
    described = {"tags": [route.tag], "responses": responses, "openapi_extra": extra, "response_class": Response}
    return described | {"generate_unique_id_function": operation_id}


def _drop_fastapi_errors(schema: dict[str, Any]) -> None:
    """Removes the status 422 that FastAPI documents for path parameters: here they are strings, and always valid."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
