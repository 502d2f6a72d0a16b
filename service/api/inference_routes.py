"""The routes that run models, each with the wire format of its bodies. A new route needs one record here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from bertserve.service.api.call import Call
from bertserve.service.api.error_responses import error_text
from bertserve.service.api.formats import cohere, kserve, open_inference, openai
from bertserve.service.api.formats.hugging_face import read_at_base, read_for_model, read_for_task
from bertserve.service.api.formats.ignored_fields import is_null_or_ignored
from bertserve.service.api.formats.tei import EmbedAllBody, SequencesBody
from bertserve.service.api.request import RequestContext
from bertserve.service.api.routing import InferenceRoute
from bertserve.service.tasks import classify, embed, rerank
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import LabelScore
from bertserve.service.tasks.task_spec import TaskSpec


def inference_routes() -> list[InferenceRoute]:
    """Returns the routes that run models; the routes of tasks come first."""
    return [
        *map(_of_task, TASKS.values()),
        _of_any_task("/models/{name}", read_for_model, "Run a model by its name, for its own task or one that the body fits"),
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
            kserve.read_predict,
            "Answer instances with predictions",
            (kserve.PredictBody,),
            kserve.RESPONSE_EXAMPLE,
        ),
        InferenceRoute(
            "/v1/embeddings",
            openai.read_embeddings,
            "Embed texts as vectors, in the format of OpenAI's API",
            (openai.EmbeddingsBody,),
            openai.RESPONSE_EXAMPLE,
            task=embed.TASK,
            error_format=openai.error_object,
        ),
        *(
            InferenceRoute(
                path,
                cohere.read_rerank,
                "Rank documents by a query, in the format of Cohere's and Jina's APIs",
                (cohere.DocumentsBody,),
                cohere.RESPONSE_EXAMPLE,
                task=rerank.TASK,
                error_format=error_format,
            )
            for path, error_format in (("/v1/rerank", openai.error_object), ("/v2/rerank", error_text))
        ),
        _of_any_task("/invocations", read_at_base, "The same as the base URL, for SageMaker"),
        InferenceRoute(
            "/predict",
            functools.partial(read_for_task, classify.TASK, SequencesBody, ignores=is_null_or_ignored),
            "Classify texts or pairs of texts, in the format of Text Embeddings Inference",
            (SequencesBody,),
            list[LabelScore] | list[list[LabelScore]],
            task=classify.TASK,
        ),
        InferenceRoute(
            "/embed_all",
            functools.partial(read_for_task, embed.TASK, EmbedAllBody, ignores=is_null_or_ignored),
            "Embed each token of texts, in the format of Text Embeddings Inference",
            (EmbedAllBody,),
            list[list[list[float]]],
            task=embed.TASK,
        ),
    ]


def _of_task(spec: TaskSpec) -> InferenceRoute:
    read = functools.partial(read_for_task, spec.name, spec.body)
    return InferenceRoute(f"/{spec.path}", read, spec.title, (spec.body,), spec.response_type, task=spec.name, streams=True)


def _of_any_task(path: str, read: Callable[[bytes, RequestContext], Call], summary: str) -> InferenceRoute:
    bodies = tuple(spec.body for spec in TASKS.values())
    response_type = functools.reduce(operator.or_, (spec.response_type for spec in TASKS.values()))
    return InferenceRoute(path, read, summary, bodies, response_type, streams=True)
