"""The wire format of the Hugging Face Inference API, which this service uses: `inputs` and `parameters`; a list gets a list of answers.

KServe's V1 protocol, which Vertex AI uses too, is the same with other keys: `instances`, answered by `predictions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bertserve.service.errors import InvalidValueError, Sent, TooLargeError
from bertserve.service.serving.model import Model
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.clients import answer_for, upgrade_legacy_body
from bertserve.service.wire.reading import parse_json, read_as, requested_task, show, validate_as
from bertserve.service.wire.unknown_fields import HARMLESS, check_names


def read_for_task(task: str, incoming: Incoming) -> Call:
    """Reads a body at a task's path; it may name a model."""
    body = read_as(TASKS[task].body, incoming.raw, incoming.limits)
    return _call(task, incoming.models.for_task(task, body.model), body, incoming)


def read_for_model(incoming: Incoming) -> Call:
    """Reads a body for the model in the path: one for the model's task, or for another task that the body's fields identify."""
    model = incoming.model
    assert model is not None, "the path names a model"
    return _call_for_model(parse_json(incoming.raw, TASKS[model.task].body), model, incoming)


def _call_for_model(value: Any, model: Model, incoming: Incoming) -> Call:
    task = requested_task(model.task, value)
    incoming.models.for_task(task, model.name)
    body = validate_as(TASKS[task].body, value, incoming.limits)
    if body.model not in (None, model.name):
        raise InvalidValueError(
            "`model` is `{given}`, but the path names `{model}`; remove one of them.", given=Sent(body.model), model=model.name
        )
    return _call(task, model, body, incoming)


def read_at_base(incoming: Incoming) -> Call:
    """Reads a body at the base URL, the only path of an Inference Endpoint: for the only model, or the only task that the body fits."""
    served = incoming.models.models
    if len(served) == 1:
        return read_for_model(replace(incoming, model=next(iter(served.values()))))
    loaded = [task for task in TASKS if any(task in model.tasks for model in served.values())]
    value = parse_json(incoming.raw, TASKS[(loaded or list(TASKS))[0]].body)
    if isinstance(value, dict) and isinstance(name := value.get("model"), str):
        return _call_for_model(value, incoming.models.get(name), incoming)
    fitting = {task: body for task in loaded if (body := _fitting(task, value, incoming.limits)) is not None}
    if len(fitting) != 1:
        could = f"fits several tasks, {_paths(fitting)}" if fitting else f"fits none of the loaded tasks, {_paths(loaded)}"
        raise InvalidValueError("the body {could}; send it to the path of a task or to /models/NAME, or set `model`.", could=could)
    ((task, fitted),) = fitting.items()
    model = incoming.models.for_task(task)
    if isinstance(fitted, TooLargeError):
        raise fitted
    return _call(task, model, fitted, incoming)


def _call(task: str, model: Model, body: TaskBody, incoming: Incoming) -> Call:
    answer = answer_for(incoming.headers.get(b"user-agent", b""), task, body)
    return Call(task, model, body, lambda answered: answer(answered.results))


def _fitting(task: str, value: Any, limits: Limits) -> TaskBody | TooLargeError | None:
    """Returns a value as the body of a task, or the error if it is too large; None if it does not fit the task."""
    kind = TASKS[task].body
    if isinstance(value, dict) and not _names_fit(kind, value):
        return None  # without the error of `validate_as`, which compares the names with all known ones
    try:
        return validate_as(kind, value, limits)
    except TooLargeError as error:
        return error
    except InvalidValueError:
        return None


def _names_fit(kind: type[TaskBody], value: dict[str, Any]) -> bool:
    parameters = value.get("parameters")
    fits = upgrade_legacy_body(kind, value).keys() <= kind.names | HARMLESS.keys()
    return fits and (not isinstance(parameters, dict) or parameters.keys() <= kind.parameters_type.model_fields.keys())


def _paths(tasks: Iterable[str]) -> str:
    return ", ".join(f"/{TASKS[task].path}" for task in tasks) or "none"


class PredictBody(BaseModel):
    """Body of a request in KServe's V1 protocol."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"instances": ["A warm, funny film.", "Dull."]}]})

    instances: list[Any] = Field(description="List of inputs in the format of the model's task.")
    parameters: dict[str, Any] | None = Field(None, description="Parameters of the task.")


class Predictions(BaseModel):
    """Answer in KServe's V1 protocol."""

    predictions: list[Any]


def read_predict(incoming: Incoming) -> Call:
    """Reads a body for the model in the path: for the model's task or for zero-shot classification.

    Raises:
        MalformedRequestError: The body is not JSON.
        InvalidValueError: The JSON does not match the protocol or the task.
        TooLargeError: It has more instances than are allowed, or a text is too long.
    """
    model = incoming.model
    assert model is not None, "the path names a model"
    value = parse_json(incoming.raw)
    if not isinstance(value, dict) or not isinstance(value.get("instances"), list):
        received = show(value["instances"]) if isinstance(value, dict) and "instances" in value else "missing"
        raise InvalidValueError('`instances` must be a list, but it is {given}; send {{"instances": ["a text"]}}.', given=received)
    check_names(value, list(PredictBody.model_fields), "the body")
    task = requested_task(model.task, value)
    incoming.models.for_task(task, model.name)
    body = validate_as(TASKS[task].body, {"inputs": value["instances"], "parameters": value.get("parameters") or {}}, incoming.limits)
    return Call(task, model, body, lambda answered: {"predictions": answered.results})
