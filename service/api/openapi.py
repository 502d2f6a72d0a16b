"""The OpenAPI document and the page `/docs` that shows it. FastAPI describes the routes; this module adds bodies, responses and errors."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import Response

from bertserve.service import __version__
from bertserve.service.api.formats import openai
from bertserve.service.api.jsonl import LINES_TYPE
from bertserve.service.api.request import TIMEOUT_HEADER
from bertserve.service.api.routing import GuardedRoute, InferenceRoute, file_route
from bertserve.service.auth import Access
from bertserve.service.body.json_text import to_json
from bertserve.service.tasks.catalog import TASKS

DESCRIPTION = """Fine-tuned BERT-family encoders over HTTP, in the wire format of the Hugging Face Inference API.

For a list of inputs, the answer is a list. Errors have one shape, `{"error", "error_type", "request_id"}`; below `/v1`, `error` is
an object in OpenAI's format. Every answer has the header `x-request-id`. The answer of a model also has `x-model` and
`server-timing`; `x-truncated` and `X-HF-Warning` say when text was cut."""
# the order of the page, with the most used ones first
TAGS = [
    {"name": "inference", "description": "Send texts and get predictions, in the wire format of the Hugging Face Inference API."},
    {"name": "other clients", "description": "The same models in the formats of other APIs, for existing clients."},
    {"name": "open inference", "description": "Metadata and probes of the Open Inference Protocol."},
    {"name": "models", "description": "The loaded models, and which model answers on which path."},
    {"name": "health", "description": "Probes and metrics."},
]
_TIMEOUT_PARAMETER = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "schema": {"type": "integer", "minimum": 1},
    "description": "Milliseconds until the request must have started.",
}
# error statuses of the routes that run models, and of the other routes by their access
_MODEL_STATUSES = (400, 401, 404, 408, 413, 415, 422, 429, 431, 500, 503, 504)
_STATUSES: dict[Access, tuple[int, ...]] = {
    Access.PUBLIC: (),
    Access.PROBE: (401, 503),
    Access.METRICS: (401,),
    Access.KEY: (401,),
    Access.ADMIN: (401, 403, 409, 422),
}
_LINES = {"schema": {"type": "string", "description": "JSON Lines: each line is a body, and is answered by one line."}}
_PARAMETER = re.compile(r"\{(\w+)\}")  # a parameter in a path
_SCRIPT, _STYLE, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"  # files of the page, below _STATIC
_STATIC = "docs/static"
_TYPES = {_SCRIPT: "text/javascript; charset=utf-8", _STYLE: "text/css; charset=utf-8", _ICON: "image/png"}


def docs_routes(described: Sequence[GuardedRoute], root_path: str, *, requires_key: bool) -> list[GuardedRoute]:
    """Returns the routes of the OpenAPI document and of its page, which works offline: an installed package contains its files."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="bertserve",
        swagger_js_url=f"{_STATIC}/{_SCRIPT}",
        swagger_css_url=f"{_STATIC}/{_STYLE}",
        swagger_favicon_url=f"{_STATIC}/{_ICON}",
        swagger_ui_parameters={"docExpansion": "none"},
    )
    content = cache(lambda: to_json(describe_routes(described, root_path, requires_key=requires_key)))

    async def document() -> Response:
        return Response(await asyncio.to_thread(content), media_type="application/json")

    files = resources.files("fastapi_swagger.resources")
    return [
        GuardedRoute("/openapi.json", document, access=Access.PUBLIC, include_in_schema=False),
        file_route("/docs", bytes(page.body), {"content-type": "text/html; charset=utf-8"}),
        *(
            file_route(f"/{_STATIC}/{name}", files.joinpath(name).read_bytes(), {"content-type": kind, "cache-control": "max-age=3600"})
            for name, kind in _TYPES.items()
        ),
    ]


def describe_routes(described: Sequence[GuardedRoute], root_path: str = "", *, requires_key: bool = False) -> dict[str, Any]:
    """Returns the OpenAPI document about routes."""
    document = get_openapi(
        title="bertserve",
        version=__version__,
        description=DESCRIPTION,
        tags=TAGS,
        servers=[{"url": root_path}] if root_path else None,
        routes=described,
    )
    inference = [route for route in described if isinstance(route, InferenceRoute)]
    bodies = dict.fromkeys(body for route in inference for body in route.bodies)
    schemas, definitions = TypeAdapter.json_schemas(
        [
            *((body, "validation", TypeAdapter(body)) for body in bodies),
            *((route.path, "serialization", TypeAdapter(route.response_type)) for route in inference),
        ],
        ref_template="#/components/schemas/{model}",
    )
    document["components"] = {"schemas": {**definitions["$defs"], **_error_schemas()}}
    for route in described:
        for method in route.methods if route.include_in_schema else ():
            operation = document["paths"][route.path][method.lower()]
            operation.pop("description", None)  # FastAPI takes it from the docstring, which is for readers of the code
            parameters = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _PARAMETER.findall(route.path)
            ]
            if isinstance(route, InferenceRoute):
                operation |= _describe_inference(route, schemas)
                parameters.append(_TIMEOUT_PARAMETER)
            operation["parameters"] = parameters
            operation["operationId"] = _operation_id(method, route.path)
            operation["responses"] |= dict(_errors(route))
    if requires_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _describe_inference(route: InferenceRoute, schemas: Any) -> dict[str, Any]:
    """Returns the description of a route that runs models, except for its errors; `schemas` are by body type and mode, or path and mode."""
    references = [schemas[body, "validation"] for body in route.bodies]
    json_body: dict[str, Any] = {"schema": references[0]}
    if len(references) > 1:
        examples = {spec.path: {"summary": spec.title, "value": spec.body.example()} for spec in TASKS.values()}
        json_body = {"schema": {"anyOf": references}, "examples": examples}
    json_response = {"schema": schemas[route.path, "serialization"]}
    other = {**route.other_content, **({LINES_TYPE: _LINES} if route.streams else {})}
    result = {"description": "A result, or a list of them: one for each input.", "content": {"application/json": json_response} | other}
    return {
        "requestBody": {"required": True, "content": {"application/json": json_body} | other},
        "responses": {"200": result},
    }


def _error_schemas() -> dict[str, Any]:
    """Returns the schemas of an error by name: the service's own format, and OpenAI's, in which `error` is an object."""
    text, text_or_null = {"type": "string"}, {"type": ["string", "null"]}

    def describe(**properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": list(properties)}

    error_object = describe(message=text, type=text, param=text_or_null, code=text)
    description = "An error: its kind, and one sentence that says what is wrong and what to change."
    return {
        name: describe(error=error, error_type=text, request_id=text) | {"description": description}
        for name, error in (("ErrorBody", text), ("OpenAIErrorBody", error_object))
    }


def _errors(route: GuardedRoute) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the responses with errors by status."""
    name = "OpenAIErrorBody" if route.error_format is openai.error_object else "ErrorBody"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    statuses = _MODEL_STATUSES if isinstance(route, InferenceRoute) else _STATUSES[route.access]
    if _PARAMETER.search(route.path):
        statuses += (HTTPStatus.NOT_FOUND,)
    for status in sorted({route.error_format(status, "", "")[0] for status in statuses}):  # each format can change it
        yield str(int(status)), {"description": HTTPStatus(status).phrase, "content": content}
    yield "default", {"description": "An error.", "content": content}


def _operation_id(method: str, path: str) -> str:
    """Returns the name of an operation in generated clients: its path in words, such as `classify` or `get_models_by_name_info`."""
    words = "_".join(re.findall("[a-z0-9]+", _PARAMETER.sub(r"by_\1", path))) or "base_url"
    return words if method == "POST" else f"get_{words}"
