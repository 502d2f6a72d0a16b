"""The routes that run models, each with its access and the wire format of its bodies. A new route is one record here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bertserve.service.api_keys import Access
from bertserve.service.tasks import classify, embed, rerank
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import LabelScore
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.tasks.tokens import TOOLS
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.clients import LEGACY_ANSWERS
from bertserve.service.wire.cohere import DocumentsBody, RankedList, read_rerank
from bertserve.service.wire.hugging_face import PredictBody, Predictions, read_at_base, read_for_model, read_for_task, read_predict
from bertserve.service.wire.infer_body import InferAnswer, InferBody
from bertserve.service.wire.open_inference import read_infer
from bertserve.service.wire.openai import EmbeddingList, EmbeddingsBody, read_embeddings
from bertserve.service.wire.tei import EmbedAllBody, SequencesBody, read_embed_all, read_for_tool, read_sequences


@dataclass(frozen=True, slots=True)
class Route:
    """A path that runs models, by POST.

    Attributes:
        path: The path; `{name}` in it is a model's name, and `{version}` its version.
        read: Makes a call of a request.
        summary: What it does, in a few words, for OpenAPI.
        bodies: What it takes, for OpenAPI; one of them.
        answers: Types of its answers, for OpenAPI; one of them.
        task: The task that it is for; None where the model or the body says.
        binary: Whether what it takes and gives may be bytes after its JSON.
        streams: Whether it takes JSON Lines too: a body in each line, and an answer for each.
        access: Who may call it.
    """

    path: str
    read: Callable[[Incoming], Call]
    summary: str
    bodies: tuple[type[BaseModel], ...]
    answers: tuple[Any, ...]
    task: str | None = None
    binary: bool = False
    streams: bool = False
    access: Access = Access.KEY


def all_routes() -> list[Route]:
    """Returns all routes, those of the listed tasks first."""
    return [
        *map(_of_task, TASKS.values()),
        _of_any_task(
            "/models/{name}", read_for_model, "Ask a model by its name, in the form of its task or of another that the body shows"
        ),
        _of_any_task("/", read_at_base, "Ask the one model that is loaded, or the default model of the one task that the body can be for"),
        *_infer_routes(),
        Route("/v1/models/{name}:predict", read_predict, "Answer instances with predictions", (PredictBody,), (Predictions,)),
        Route(
            "/v1/embeddings",
            read_embeddings,
            "Embed texts as vectors, as OpenAI's API does",
            (EmbeddingsBody,),
            (EmbeddingList,),
            task=embed.TASK,
        ),
        *(
            Route(
                path,
                read_rerank,
                "Rank documents by a query, as Cohere's and Jina's APIs do",
                (DocumentsBody,),
                (RankedList,),
                task=rerank.TASK,
            )
            for path in ("/v1/rerank", "/v2/rerank")
        ),
        _of_any_task("/invocations", read_at_base, "Answer as at the base URL, as SageMaker asks"),
        Route(
            "/predict",
            read_sequences,
            "Classify texts or pairs of texts, as Text Embeddings Inference does",
            (SequencesBody,),
            (list[LabelScore], list[list[LabelScore]]),
            task=classify.TASK,
        ),
        Route(
            "/embed_all",
            read_embed_all,
            "Embed each token of texts, as Text Embeddings Inference does",
            (EmbedAllBody,),
            (list[list[list[float]]],),
            task=embed.TASK,
        ),
        *map(_of_tool, TOOLS.values()),
    ]


def _answers(spec: TaskSpec) -> tuple[Any, ...]:
    """Returns the types of a task's answer, those for older clients included."""
    return (spec.answer, LEGACY_ANSWERS[spec.name]) if spec.name in LEGACY_ANSWERS else (spec.answer,)


def _of_task(spec: TaskSpec) -> Route:
    read = functools.partial(read_for_task, spec.name)
    return Route(f"/{spec.path}", read, spec.title, (spec.body,), _answers(spec), task=spec.name, streams=True)


def _of_any_task(path: str, read: Callable[[Incoming], Call], summary: str) -> Route:
    bodies = tuple(spec.body for spec in TASKS.values())
    return Route(path, read, summary, bodies, tuple(answer for spec in TASKS.values() for answer in _answers(spec)), streams=True)


def _infer_routes() -> list[Route]:
    paths = {
        "/v2/models/{name}/infer": "Answer tensors with tensors, texts or token ids",
        "/v2/models/{name}/versions/{version}/infer": "Answer tensors with tensors, if the model is of this version",
    }
    return [Route(path, read_infer, summary, (InferBody,), (InferAnswer,), binary=True) for path, summary in paths.items()]


def _of_tool(tool: TaskSpec) -> Route:
    read, summary = functools.partial(read_for_tool, tool.name), f"{tool.title}, as Text Embeddings Inference does"
    return Route(f"/{tool.path}", read, summary, (tool.body,), (tool.answer,), task=tool.name)
