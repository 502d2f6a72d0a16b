"""What OpenAPI says of the paths that run models, and the page that shows it. Everything follows from the list of tasks."""

from __future__ import annotations

import functools
import operator
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from service.http.inference import MODELS, TIMEOUT_HEADER
from service.tasks.catalog import TASKS
from service.tasks.spec import TaskSpec

ANYWHERE = (401, 429, 431, 500, 503)  # statuses that an answer may have whatever is asked for


class ErrorBody(BaseModel):
    """Every error: one sentence of what was wrong and what to change, and its kind."""

    error: str
    error_type: str
    request_id: str


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns what OpenAPI says of a route's errors: these, and those that any request may get."""
    return {status: {"model": ErrorBody} for status in sorted({*statuses, *ANYWHERE})}


def documented() -> APIRouter:
    """Returns the paths that run models as FastAPI sees them: documented, and with the methods that a 405 names. Posts never get here."""
    routes = APIRouter()

    async def endpoint() -> None:
        raise AssertionError("a route that only documents was run. This is a bug.")

    async def named(name: str) -> None:
        raise AssertionError("a route that only documents was run. This is a bug.")

    for spec in TASKS.values():
        summary = f"Answer with the task's default model, or the one named in `model` ({spec.name})"
        routes.post(f"/{spec.path}", summary=summary, **_described(spec))(endpoint)
    summary = "Answer with this model, in the form of its task or of another that the body asks for"
    routes.post(f"{MODELS}/{{name}}", summary=summary, **_described(*TASKS.values()))(named)
    return routes


def add_docs(app: FastAPI) -> None:
    """Adds `/docs` from files of an installed package, so that it works offline, and the schemas of the bodies."""
    app.mount("/docs/static", StaticFiles(packages=[("fastapi_swagger", "resources")]), name="docs-static")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="bertserve",
            swagger_js_url="docs/static/swagger-ui-bundle.js",
            swagger_css_url="docs/static/swagger-ui.css",
            swagger_favicon_url="docs/static/favicon-32x32.png",
        )

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            modes = [(spec.body, "validation") for spec in TASKS.values()]
            _, bodies = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"].update(bodies["$defs"])
            _drop_fastapi_errors(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema


def _described(*specs: TaskSpec) -> dict[str, Any]:
    """Returns what OpenAPI needs of a route, of one task or several, that reads the raw request."""
    responses = {
        200: {
            "model": functools.reduce(operator.or_, (spec.answer for spec in specs)),
            "description": "A result, or a list of them: one for each input.",
        },
        **error_responses(400, 404, 408, 413, 415, 422, 504),
    }
    references = [{"$ref": f"#/components/schemas/{spec.body.__name__}"} for spec in specs]
    parameter = {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "Milliseconds until the request must have started.",
    }
    extra = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}},
        },
        "parameters": [parameter],
    }
    return {"tags": ["inference"], "responses": responses, "openapi_extra": extra, "response_class": Response}


def _drop_fastapi_errors(schema: dict[str, Any]) -> None:
    """Removes the 422 that FastAPI documents for path parameters: ours are texts, which are always valid."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
