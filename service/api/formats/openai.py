"""The wire format of OpenAI's embeddings: `input` in, a list of vectors and the number of tokens out. Errors are objects."""

import time
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from bertserve.service.api.call import JSON_HEADERS, Call, Headers
from bertserve.service.api.formats.ignored_fields import is_null_or_ignored
from bertserve.service.api.request import RequestContext
from bertserve.service.api.routing import GuardedRoute, InferenceRoute
from bertserve.service.api.service_routes import info_route
from bertserve.service.app_state import AppState
from bertserve.service.body.json_text import to_json
from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import TaskBody, TextOrTexts, body_config
from bertserve.service.bundle.manifest import ModelConfig
from bertserve.service.errors import InvalidValueError
from bertserve.service.models.request_progress import Prediction
from bertserve.service.tasks import embed

_RESPONSE_EXAMPLE: dict[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.04, -0.01]}],
    "model": "embed",
    "usage": {"prompt_tokens": 19, "total_tokens": 19},
}
_CREATED = int(time.time())  # clients show it; the creation time of a model is unknown
BASE_PATH = "/v1/"  # clients send all their requests below it, also for endpoints that this service lacks
_ERROR_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def error_object(status: int, error_type: str, message: str) -> tuple[int, dict[str, Any]]:
    """Returns the status and the error as OpenAI's clients expect them: for status 400 they raise BadRequestError, but not for 422."""
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        status = HTTPStatus.BAD_REQUEST
    openai_type = _ERROR_TYPES.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")
    return status, {"message": message, "type": openai_type, "param": None, "code": error_type}


def _no_token_ids(value: Any) -> Any:
    """Refuses token ids: clients of this API use OpenAI's vocabularies, so their ids would mean other words here."""
    if isinstance(value, list) and value and type(value[0]) in (int, list):
        raise PydanticCustomError(
            "token_ids",
            "must be texts, because token ids may belong to another model's vocabulary (LangChain: `check_embedding_ctx_length=False`)",
        )
    return value


class EmbeddingsBody(TaskBody):
    """Body of an embedding request in the format of OpenAI's API."""

    model_config = body_config(input=["A warm, funny film.", "The bridge was built in 1886."], encoding_format="float")
    input_name: ClassVar[str] = "input"

    input: Annotated[TextOrTexts, BeforeValidator(_no_token_ids)]
    encoding_format: embed.EncodingFormat = None
    dimensions: embed.Dimensions = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None

    def task_inputs(self, config: ModelConfig) -> list[Any]:
        """Returns one input per text.

        Raises:
            InvalidValueError: The model's vectors are shorter, or it returns a vector per token.
        """
        # clients expect unit vectors, as from OpenAI and Text Embeddings Inference, and no field of this format changes that
        parameters = embed.EmbedParameters(dimensions=self.dimensions, encoding_format=self.encoding_format, normalize=True)
        inputs = embed.embed_inputs(self.items, parameters, config)
        if any(input_.parameters.pooling == "none" for input_ in inputs):
            raise InvalidValueError(
                "this model returns a vector for each token, which this format does not support; send a POST to /embed instead."
            )
        return inputs


class Embedding(BaseModel):
    """The vector of a text, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """The vectors of all texts, in their order."""

    model_config = ConfigDict(json_schema_extra={"examples": [_RESPONSE_EXAMPLE]})

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]


def usage(prediction: Prediction) -> dict[str, int]:
    """Returns the tokens that were read, including special tokens, as OpenAI's clients expect them."""
    return {"prompt_tokens": prediction.tokens, "total_tokens": prediction.tokens}


def read_embeddings(raw: bytes, request: RequestContext) -> Call:
    """Reads a body of `/v1/embeddings`."""
    body = validate_as(EmbeddingsBody, parse_json(raw, EmbeddingsBody), request.state.limits, is_null_or_ignored)
    model = request.state.registry.for_task(embed.TASK, body.model)

    def to_body(prediction: Prediction) -> tuple[bytes, Headers]:
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(prediction.results)]
        return to_json({"object": "list", "data": data, "model": model.name, "usage": usage(prediction)}), JSON_HEADERS

    return Call(embed.TASK, model, body, to_body)


def list_models(state: AppState) -> dict[str, Any]:
    """Returns all models; clients of KServe's V1 protocol use the same paths, and read other keys."""
    names = list(state.registry.models)
    return {"object": "list", "data": [describe_model(state, name) for name in names], "models": names}


def describe_model(state: AppState, name: str) -> dict[str, Any]:
    """Returns a model.

    Raises:
        HttpError: The model is not loaded.
    """
    model = state.registry.get(name)
    kserve_keys = {"task": model.task, "name": model.name, "ready": state.scheduler.ready}
    return {"id": model.name, "object": "model", "created": _CREATED, "owned_by": "bertserve", **kserve_keys}


def routes() -> list[GuardedRoute]:
    """Returns the routes of embeddings and of models."""
    summary, types = "Embed texts as vectors, in the format of OpenAI's API", ((EmbeddingsBody,), EmbeddingsResponse)
    return [
        InferenceRoute("/v1/embeddings", read_embeddings, summary, *types, task=embed.TASK, error_format=error_object),
        info_route("/v1/models", list_models, "All models, in OpenAI's format", error_format=error_object),
        info_route("/v1/models/{name}", describe_model, "One model, in OpenAI's format", error_format=error_object),
    ]
