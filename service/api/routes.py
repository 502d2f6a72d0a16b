"""The routes that run models, each with the wire format of its bodies. A new route needs one record here.

The router matches a request to one route, and this route checks its own access. So there is no second list of paths that
decides about access. The service does not start if a route declares no access.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from bertserve.service.api.call import Call
from bertserve.service.api.formats.cohere import DocumentsBody, RankedList, read_rerank
from bertserve.service.api.formats.hugging_face import PredictBody, Predictions, read_at_base, read_for_model, read_for_task, read_predict
from bertserve.service.api.formats.open_inference import InferAnswer, InferBody, read_infer
from bertserve.service.api.formats.openai import EmbeddingList, EmbeddingsBody, read_embeddings
from bertserve.service.api.formats.tei import EmbedAllBody, SequencesBody, read_foreign
from bertserve.service.api.request import REQUEST, Request
from bertserve.service.api_keys import Access
from bertserve.service.tasks import classify, embed, rerank
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import LabelScore
from bertserve.service.tasks.task_spec import TaskSpec

INFERENCE, OTHER_CLIENTS = "inference", "other clients"  # tags in OpenAPI


@dataclass(frozen=True, slots=True)
class Route:
    """A path that runs models, for POST requests.

    Attributes:
        path: The path; `{name}` in it is a model's name.
        read_call: Returns the call of a body and its request.
        summary: A short description for OpenAPI.
        bodies: Types of the body, for OpenAPI; a body has one of them.
        answers: Types of the answer, for OpenAPI; an answer has one of them.
        task: The task of the path; None if it depends on the model or the body.
        streams: Whether it also accepts JSON Lines: one body per line, answered by one line each.
        tag: The tag of the operation in OpenAPI.
    """

    path: str
    read_call: Callable[[bytes, Request], Call]
    summary: str
    bodies: tuple[type[BaseModel], ...]
    answers: tuple[Any, ...]
    task: str | None = None
    streams: bool = False
    tag: str = OTHER_CLIENTS


class GuardedRoute(APIRoute):
    """A route of FastAPI that checks its access before it runs. `openapi.endpoints` makes a subclass for each access."""

    access: Access

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request that the router has matched to this route; a wrong method gets status 405."""
        assert self.methods is not None, "FastAPI gives every route methods"
        if scope["method"] in self.methods:
            request: Request = scope[REQUEST]
            request.key = request.auth.check(self.access, scope["headers"])
        await super().handle(scope, receive, send)


class InferenceRoute(GuardedRoute):
    """A `Route` in FastAPI, which describes it and answers 405 for other methods; `Endpoint` serves its requests."""

    access = Access.KEY

    def __init__(self, spec: Route, **description: Any) -> None:
        """Takes FastAPI's arguments for OpenAPI; FastAPI never calls the function of this route."""
        self.spec = spec
        super().__init__(spec.path, lambda: None, methods=["POST"], summary=spec.summary, response_model=None, **description)


def all_routes() -> list[Route]:
    """Returns all routes; those of tasks come first."""
    return [
        *map(_of_task, TASKS.values()),
        _of_any_task(
            "/models/{name}",
            read_for_model,
            "Run a model by its name, for its own task or for another one that the body identifies",
            tag=INFERENCE,
        ),
        _of_any_task("/", read_at_base, "Run the only loaded model"),
        Route("/v2/models/{name}/infer", read_infer, "Run a model on tensors of texts", (InferBody,), (InferAnswer,)),
        Route("/v1/models/{name}:predict", read_predict, "Answer instances with predictions", (PredictBody,), (Predictions,)),
        Route(
            "/v1/embeddings",
            read_embeddings,
            "Embed texts as vectors, in the format of OpenAI's API",
            (EmbeddingsBody,),
            (EmbeddingList,),
            task=embed.TASK,
        ),
        *(
            Route(
                path,
                read_rerank,
                "Rank documents by a query, in the format of Cohere's and Jina's APIs",
                (DocumentsBody,),
                (RankedList,),
                task=rerank.TASK,
            )
            for path in ("/v1/rerank", "/v2/rerank")
        ),
        _of_any_task("/invocations", read_at_base, "The same as the base URL, for SageMaker"),
        Route(
            "/predict",
            functools.partial(read_foreign, classify.TASK, SequencesBody),
            "Classify texts or pairs of texts, in the format of Text Embeddings Inference",
            (SequencesBody,),
            (list[LabelScore], list[list[LabelScore]]),
            task=classify.TASK,
        ),
        Route(
            "/embed_all",
            functools.partial(read_foreign, embed.TASK, EmbedAllBody),
            "Embed each token of texts, in the format of Text Embeddings Inference",
            (EmbedAllBody,),
            (list[list[list[float]]],),
            task=embed.TASK,
        ),
    ]


def _of_task(spec: TaskSpec) -> Route:
    read = functools.partial(read_for_task, spec.name)
    return Route(f"/{spec.path}", read, spec.title, (spec.body,), (spec.answer,), task=spec.name, streams=True, tag=INFERENCE)


def _of_any_task(path: str, read: Callable[[bytes, Request], Call], summary: str, tag: str = OTHER_CLIENTS) -> Route:
    bodies = tuple(spec.body for spec in TASKS.values())
    return Route(path, read, summary, bodies, tuple(spec.answer for spec in TASKS.values()), streams=True, tag=tag)


def check_declared(routes: Iterable[BaseRoute]) -> None:
    """Checks at startup that all routes declare their access.

    Raises:
        TypeError: A route does not.
    """
    for route in routes:
        if not (isinstance(route, GuardedRoute) and isinstance(getattr(route, "access", None), Access)):
            raise TypeError(f"the route {getattr(route, 'path', route)!r} declares no access; use `endpoints` of service/api/openapi.py.")
