"""The wire format of KServe's V1 protocol, which Vertex AI uses too: a task's inputs as `instances`, answered by `predictions`."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from bertserve.service.api.call import JSON_HEADERS, Call
from bertserve.service.api.request import RequestContext
from bertserve.service.api.routing import InferenceRoute
from bertserve.service.body.json_text import to_json
from bertserve.service.body.reading import read_protocol, validate_as
from bertserve.service.body.task_body import ClosedModel
from bertserve.service.tasks.catalog import TASKS

_EXAMPLE: dict[str, Any] = {"instances": ["A warm, funny film.", "Dull."]}
_Response = Annotated[dict[str, list[Any]], Field(examples=[{"predictions": [[{"label": "positive", "score": 0.998}]]}])]


class PredictBody(ClosedModel):
    """Body of a request in KServe's V1 protocol."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    instances: list[Any] = Field(description="List of inputs in the format of the model's task.")
    parameters: dict[str, Any] | None = Field(None, description="Parameters of the task.")


def read_predict(raw: bytes, request: RequestContext) -> Call:
    """Reads a body for the model in the path: for the model's task, or for the one that its fields imply."""
    model = request.named_model
    predict = read_protocol(PredictBody, raw, _EXAMPLE)
    value = {"inputs": predict.instances, "parameters": predict.parameters or {}}
    task = request.state.registry.task_of_body(model, value)
    body = validate_as(TASKS[task].body, value, request.state.limits)
    return Call(task, model, body, lambda prediction: (to_json({"predictions": prediction.results}), JSON_HEADERS))


def routes() -> list[InferenceRoute]:
    """Returns the route that runs a model."""
    summary = "Answer instances with predictions"
    return [InferenceRoute("/v1/models/{name}:predict", read_predict, summary, (PredictBody,), _Response)]
