"""The routes that run models, each with the wire format of its bodies. A new route needs one record here.

Each route declares its access, because a separate list of protected paths could disagree with the routes.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from bertserve.service.api.call import Call
from bertserve.service.api.formats import cohere, open_inference, openai
from bertserve.service.api.formats.hugging_face import PredictBody, read_at_base, read_for_model, read_for_task, read_predict
from bertserve.service.api.formats.tei import EmbedAllBody, SequencesBody
from bertserve.service.api.request import TIMEOUT_HEADER, RequestContext
from bertserve.service.auth import Access
from bertserve.service.tasks import classify, embed, rerank
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import LabelScore
from bertserve.service.tasks.task_spec import TaskSpec

LINES_TYPE = "application/x-ndjson"  # of JSON Lines, also by these names
LINES_TYPES = frozenset({LINES_TYPE.encode(), b"application/jsonl", b"application/jsonlines", b"application/x-jsonlines"})
INFERENCE, OTHER_CLIENTS = "inference", "other clients"  # tags in OpenAPI
_NAME = re.compile(r"\{(\w+)\}")  # a parameter in a path
_TIMEOUT_PARAMETER = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "schema": {"type": "integer", "minimum": 1},
    "description": "Milliseconds until the request must have started.",
}
# a reference instead of FastAPI's `model`, which would compile a validator for each route at every start
_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error.", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}}
}


class GuardedRoute(APIRoute):
    """A route that declares its access. `Application` checks it, and serves only such routes.

    `guarded_router` makes a subclass for each access.
    """

    access: Access = Access.ADMIN  # without a declaration
    methods: set[str]  # FastAPI gives every route methods


class InferenceRoute(GuardedRoute):
    """A path that runs models, for POST. FastAPI only describes it; `Application` serves its requests.

    Attributes:
        read_call: Returns the call of a body and its request.
        bodies: Types of the body, for OpenAPI; a body has one of them.
        task: The task of the path; None if it depends on the model or the body.
        streams: Whether it also accepts JSON Lines: one body per line, answered by one line each.
    """

    access = Access.KEY

    def __init__(
        self,
        path: str,
        read_call: Callable[[bytes, RequestContext], Call],
        summary: str,
        bodies: tuple[type[BaseModel], ...],
        response: Any,
        *,
        task: str | None = None,
        streams: bool = False,
        tag: str = OTHER_CLIENTS,
    ) -> None:
        """Creates the route and its OpenAPI description; `{name}` in the path is a model's name.

        `response` is the type of the response or, for a format that others define, an example.
        """
        self.read_call, self.bodies, self.task, self.streams = read_call, bodies, task, streams
        lines: dict[str, Any] = {LINES_TYPE: {"schema": {"type": "string", "description": "JSON Lines."}}} if streams else {}
        result: dict[str, Any] = {"description": "A result, or a list of them: one for each input."}
        if isinstance(response, dict):
            result["content"] = {"application/json": {"example": response}}
        else:
            result |= {"model": response, "content": lines}
        references = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies]
        json_body: dict[str, Any] = {"schema": references[0]}
        if len(bodies) > 1:
            json_body = {
                "schema": {"anyOf": references},
                "examples": {spec.path: {"summary": spec.title, "value": spec.body.example()} for spec in TASKS.values()},
            }
        path_params = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _NAME.findall(path)]
        super().__init__(
            path,
            lambda: None,  # never called
            methods=["POST"],
            summary=summary,
            tags=[tag],
            response_model=None,
            response_class=Response,
            responses={200: result, **_ERRORS},
            openapi_extra={
                "requestBody": {"required": True, "content": {"application/json": json_body} | lines},
                "parameters": [*path_params, _TIMEOUT_PARAMETER],
            },
            generate_unique_id_function=operation_id,
        )


def guarded_router(access: Access, **options: Any) -> APIRouter:
    """Returns a router for routes of one access, with further arguments of `APIRouter`."""
    route_class = type("GuardedRoute", (GuardedRoute,), {"access": access})
    return APIRouter(route_class=route_class, generate_unique_id_function=operation_id, responses=_ERRORS, **options)


def add_file(router: APIRouter, path: str, content: bytes, headers: Mapping[str, str]) -> None:
    """Adds a route that answers with a file from memory: all clients share its bytes, and it needs no descriptor and no thread."""

    @router.get(path)
    async def file() -> Response:
        return Response(content, headers=headers)


def operation_id(route: APIRoute) -> str:
    """Returns the name of an operation in generated clients: its path in words, such as `classify` or `get_models_by_name_info`."""
    words = _NAME.sub(r"by_\1", route.path)
    words = "_".join(re.findall("[a-z0-9]+", words)) or "base_url"
    return words if "POST" in (route.methods or ()) else f"get_{words}"


def inference_routes() -> list[InferenceRoute]:
    """Returns the routes that run models; the routes of tasks come first."""
    return [
        *map(_of_task, TASKS.values()),
        _of_any_task(
            "/models/{name}", read_for_model, "Run a model by its name, for its own task or one that the body fits", tag=INFERENCE
        ),
        _of_any_task("/", read_at_base, "Run the only loaded model"),
        InferenceRoute(
            "/v2/models/{name}/infer",
            open_inference.read_infer,
            "Run a model on tensors of texts",
            (open_inference.InferBody,),
            open_inference.RESPONSE_EXAMPLE,
        ),
        InferenceRoute(
            "/v1/models/{name}:predict",
            read_predict,
            "Answer instances with predictions",
            (PredictBody,),
            {"predictions": [[{"label": "positive", "score": 0.998}]]},
        ),
        InferenceRoute(
            "/v1/embeddings",
            openai.read_embeddings,
            "Embed texts as vectors, in the format of OpenAI's API",
            (openai.EmbeddingsBody,),
            openai.RESPONSE_EXAMPLE,
            task=embed.TASK,
        ),
        *(
            InferenceRoute(
                path,
                cohere.read_rerank,
                "Rank documents by a query, in the format of Cohere's and Jina's APIs",
                (cohere.DocumentsBody,),
                cohere.RESPONSE_EXAMPLE,
                task=rerank.TASK,
            )
            for path in ("/v1/rerank", "/v2/rerank")
        ),
        _of_any_task("/invocations", read_at_base, "The same as the base URL, for SageMaker"),
        InferenceRoute(
            "/predict",
            functools.partial(read_for_task, classify.TASK, SequencesBody),
            "Classify texts or pairs of texts, in the format of Text Embeddings Inference",
            (SequencesBody,),
            list[LabelScore] | list[list[LabelScore]],
            task=classify.TASK,
        ),
        InferenceRoute(
            "/embed_all",
            functools.partial(read_for_task, embed.TASK, EmbedAllBody),
            "Embed each token of texts, in the format of Text Embeddings Inference",
            (EmbedAllBody,),
            list[list[list[float]]],
            task=embed.TASK,
        ),
    ]


def _of_task(spec: TaskSpec) -> InferenceRoute:
    read = functools.partial(read_for_task, spec.name, spec.body)
    return InferenceRoute(f"/{spec.path}", read, spec.title, (spec.body,), spec.response_type, task=spec.name, streams=True, tag=INFERENCE)


def _of_any_task(path: str, read: Callable[[bytes, RequestContext], Call], summary: str, tag: str = OTHER_CLIENTS) -> InferenceRoute:
    bodies = tuple(spec.body for spec in TASKS.values())
    response_type = functools.reduce(operator.or_, (spec.response_type for spec in TASKS.values()))
    return InferenceRoute(path, read, summary, bodies, response_type, streams=True, tag=tag)
