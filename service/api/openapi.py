"""The OpenAPI description of the paths that run models, and the page that shows it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from bertserve.service.api.routes import INFERENCE, OTHER_CLIENTS, InferenceRoute, endpoints
from bertserve.service.auth import Access
from bertserve.service.tasks.json_text import to_json

# in the order of the page: the most used ones first
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


class OpenAIError(BaseModel):
    """The error in the shape that clients of OpenAI's API expect."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """An error: its kind, and one sentence that says what is wrong and what to change; an object below `/v1`."""

    error: str | OpenAIError
    error_type: str
    request_id: str


def add_file(routes: APIRouter, path: str, content: bytes, headers: Mapping[str, str]) -> None:
    """Adds a route that answers with a file from memory: all clients share its bytes, and it needs no descriptor and no thread."""

    @routes.get(path)
    async def file() -> Response:
        return Response(content, headers=headers)


def docs_router() -> APIRouter:
    """Returns the routes of the OpenAPI document and of the page `/docs`. The page works offline: an installed package has its files."""
    routes = endpoints(Access.PUBLIC, include_in_schema=False)
    page_html = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="bertserve",
        swagger_js_url=f"{_STATIC}/{_SCRIPT}",
        swagger_css_url=f"{_STATIC}/{_STYLE}",
        swagger_favicon_url=f"{_STATIC}/{_ICON}",
    )
    files = resources.files("fastapi_swagger.resources")
    for name, media_type in _TYPES.items():
        headers = {"content-type": media_type, "cache-control": "max-age=3600"}
        add_file(routes, f"/{_STATIC}/{name}", files.joinpath(name).read_bytes(), headers)

    @routes.get("/openapi.json")
    async def openapi_document(request: Request) -> Response:
        return Response(await asyncio.to_thread(lambda: to_json(request.app.openapi())), media_type="application/json")

    @routes.get("/docs")
    async def page() -> Response:
        return page_html

    return routes


def add_description(app: FastAPI, *, asks_for_key: bool) -> None:
    """Adds the schemas of bodies to the result of `app.openapi()`, and the key if callers need one."""

    def openapi() -> dict[str, Any]:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
            servers=app.servers,
        )
        kinds = dict.fromkeys([ErrorBody, *(body for route in app.routes if isinstance(route, InferenceRoute) for body in route.bodies)])
        modes = [(kind, "validation") for kind in kinds]
        _, bodies = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        schema["components"]["schemas"].update(bodies["$defs"])
        if asks_for_key:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        return schema

    app.openapi = functools.cache(openapi)  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
