"""The first protocol of KServe, which Vertex AI speaks too: `{"instances": [...], "parameters"?}` to `{"predictions": [...]}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bertserve.service.errors import InvalidValueError
from bertserve.service.wire.call import Call, Incoming, M
from bertserve.service.wire.keys import check_names
from bertserve.service.wire.reading import parse_json, requested_task, show, validate_body


class PredictBody(BaseModel):
    """Body of a request of KServe's first protocol."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"instances": ["A warm, funny film.", "Dull."]}]})

    instances: list[Any] = Field(description="What the model's own endpoint takes as `inputs`, a list of these.")
    parameters: dict[str, Any] | None = Field(None, description="Parameters of the task.")


class Predictions(BaseModel):
    """Answer in KServe's first protocol."""

    predictions: list[Any]


def read_predict(incoming: Incoming[M]) -> Call[M]:
    """Reads a body for the model that the path names, of its task, or of zero-shot classification.

    Raises:
        MalformedRequestError: It is not JSON.
        InvalidValueError: It is not the JSON of the protocol, or not what the task takes.
        TooLargeError: It has more instances than are allowed, or a text is too long.
    """
    model = incoming.model
    assert model is not None, "the path names one"
    value = parse_json(incoming.raw)
    if not isinstance(value, dict) or not isinstance(value.get("instances"), list):
        given = show(value["instances"]) if isinstance(value, dict) and "instances" in value else "missing"
        raise InvalidValueError('`instances` must be a list, and it is {given}; send {{"instances": ["a text"]}}.', given=given)
    check_names(value, list(PredictBody.model_fields), "the body")
    task = requested_task(model.task, value)
    incoming.models.for_task(task, model.name)
    body = validate_body(task, {"inputs": value["instances"], "parameters": value.get("parameters") or {}}, incoming.limits)
    return Call(task, model, body, lambda answered: {"predictions": answered.results})
