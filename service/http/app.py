"""The application: routes, middleware and documents around an AppState."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from service import __version__
from service.errors import MethodNotAllowedError, NotFoundError
from service.http.admin import documented, router
from service.http.inference import NAMED, inference
from service.http.middleware import RequestMiddleware
from service.serving.build import AppState
from service.wire.bodies import BODIES

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

A list in is a list out. Errors have one shape, `{"error", "error_type", "request_id"}`. Every answer has the headers
`x-request-id`, `x-model` and `server-timing`; `x-truncated` and `X-HF-Warning` say when text was cut."""
_METHOD_NOT_ALLOWED = 405
NAMED_PARENT = NAMED.rpartition("/")[0]


class Application(FastAPI):
    """FastAPI, with a short cut to the paths that run models.

    Its telemetry, body limit, exit stacks and route matching take two fifths of what a short text costs the event loop
    (bench/RESULTS.md), and do nothing for these paths.

    Attributes:
        inference: By path the application of each route that runs models; requests that are no POST go the long way.
    """

    inference: Mapping[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request, or the lifespan."""
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            parent, _, name = scope["path"].rpartition("/")
            named = parent == NAMED_PARENT and name != ""
            found = self.inference.get(NAMED if named else scope["path"])
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            scope["path_params"] = {"name": name} if named else {}
            await found(scope, receive, send)


def create_app(service: AppState, *, api_key: str | None = None, access_log: bool = False) -> FastAPI:
    """Returns the application; its lanes run from its start-up to its shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await service.scheduler.stop(0)

    app = Application(title="bertserve", version=__version__, description=DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.routes[:0] = routes = inference(service)
    app.include_router(router(service))
    app.add_exception_handler(HTTPException, _translate)
    edge = functools.partial(RequestMiddleware, metrics=service.metrics, api_key=api_key, access_log=access_log)
    app.add_middleware(edge)
    app.inference = {route.path: edge(route.app) for route in routes}
    _add_docs(app)
    return app


def _drop_fastapi_errors(schema: dict[str, Any]) -> None:
    """Removes the 422 that FastAPI documents for path parameters: ours are texts, which are always valid."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


async def _translate(request: Request, error: Exception) -> Response:
    """Turns the router's own errors into ours; the Edge answers them."""
    assert isinstance(error, HTTPException)
    if error.status_code == _METHOD_NOT_ALLOWED:
        # a path may have several routes, and the router names the methods of the first one only
        methods = [
            m for m in ("GET", "POST") if any(r.matches({**request.scope, "method": m})[0] is Match.FULL for r in request.app.routes)
        ]
        allowed = ", ".join(methods)
        raise MethodNotAllowedError(f"`{request.url.path[:64]}` takes {allowed}, not {request.method}; see /docs.", allowed=allowed)
    raise NotFoundError(f"there is no path `{request.url.path[:64]}`; see /docs.")


def _add_docs(app: FastAPI) -> None:
    """Adds `/docs` from files of an installed package, so that it works offline, and the schemas of raw-read bodies."""
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
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=[*documented(), *app.routes])
            modes = [(body, "validation") for body in BODIES.values()]
            _, bodies = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"].update(bodies["$defs"])
            _drop_fastapi_errors(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
