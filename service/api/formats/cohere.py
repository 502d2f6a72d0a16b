"""The rerank format of Cohere's and Jina's clients: `documents` in, the best of them with their `relevance_score` out."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from bertserve.service.api.call import JSON_HEADERS, Call, Headers
from bertserve.service.api.error_responses import error_text
from bertserve.service.api.formats.ignored_fields import is_null_or_ignored
from bertserve.service.api.formats.openai import error_object, usage
from bertserve.service.api.request import RequestContext
from bertserve.service.api.routing import GuardedRoute, InferenceRoute
from bertserve.service.body.json_text import to_json
from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import LIST_LIMIT, TaskBody, body_config, one_of
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import InvalidValueError
from bertserve.service.models.request_progress import Prediction
from bertserve.service.tasks import rerank

_RESPONSE_EXAMPLE: dict[str, Any] = {
    "id": "5f1c",
    "model": "rerank",
    "results": [{"index": 0, "relevance_score": 0.98}],
    "usage": {"prompt_tokens": 29, "total_tokens": 29},
    "meta": {"tokens": {"input_tokens": 29}},
}


class Document(BaseModel):
    """A text with other fields, which the answer returns."""

    model_config = ConfigDict(strict=True, extra="allow")

    text: str


_Document = Annotated[str | Document, one_of("a text or an object with a `text`")]


class DocumentsBody(TaskBody):
    """Body of a rerank request in the format of Cohere's and Jina's APIs."""

    model_config = body_config(query="What is a panda?", documents=["A panda is a bear.", "The bridge was built in 1886."], top_n=1)
    input_name: ClassVar[str] = "documents"
    is_list: ClassVar[bool] = False

    query: Annotated[str, Field(description="The query to rank by.")]
    documents: Annotated[list[_Document], LIST_LIMIT, Field(description="Texts, or objects with a `text`; other keys are only returned.")]
    top_n: Annotated[int | None, Field(ge=1, description="Number of results to return; by default all.")] = None
    return_documents: Annotated[bool | None, Field(description="Include each document in the answer.")] = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def texts_by_input(self) -> Iterator[Sequence[str]]:
        """Yields the query and the texts."""
        yield self.query, *self.texts

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns the only input."""
        return [rerank.RerankInput(self.query, self.texts)]


class RankedDocument(BaseModel):
    """The score of a document, by its index in the request; with `return_documents` also the document."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(BaseModel):
    """The best documents, best first; each vendor's client expects the number of tokens in another field."""

    model_config = ConfigDict(json_schema_extra={"examples": [_RESPONSE_EXAMPLE]})

    id: Annotated[str, Field(description="The request id.")]
    model: str
    results: list[RankedDocument]
    usage: dict[str, int]
    meta: dict[str, dict[str, int]]


def read_rerank(raw: bytes, request: RequestContext) -> Call:
    """Reads a body of `/v1/rerank` and `/v2/rerank`."""
    body = validate_as(DocumentsBody, parse_json(raw, DocumentsBody), request.state.limits, is_null_or_ignored)
    model = request.state.registry.for_task(rerank.TASK, body.model)
    documents = [
        {"text": document} if isinstance(document, str) else document.model_dump() for document in body.documents if body.return_documents
    ]
    try:
        to_json(documents)
    except TypeError as error:
        raise InvalidValueError(
            "`documents` has a number of more than 64 bits, which cannot be returned; send it as a text, or remove `return_documents`."
        ) from error

    def to_body(prediction: Prediction) -> tuple[bytes, Headers]:
        (ranked,) = prediction.results
        results = [
            {"index": item["index"], "relevance_score": item["score"]} | ({"document": documents[item["index"]]} if documents else {})
            for item in ranked[: body.top_n]
        ]
        meta = {"tokens": {"input_tokens": prediction.tokens}}
        response = {"id": request.id, "model": model.name, "results": results, "usage": usage(prediction), "meta": meta}
        return to_json(response), JSON_HEADERS

    return Call(rerank.TASK, model, body, to_body)


def routes() -> list[GuardedRoute]:
    """Returns the routes of both versions; clients of the first one read errors in OpenAI's format."""
    summary = "Rank documents by a query, in the format of Cohere's and Jina's APIs"
    return [
        InferenceRoute(path, read_rerank, summary, (DocumentsBody,), RerankResponse, task=rerank.TASK, error_format=error_format)
        for path, error_format in (("/v1/rerank", error_object), ("/v2/rerank", error_text))
    ]
