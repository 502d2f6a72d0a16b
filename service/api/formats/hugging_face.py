"""The wire format of the Hugging Face Inference API, which this service uses: `inputs` and `parameters`; a list gets a list of results.

In Node, @huggingface/inference, the client for JavaScript, wraps a single input in a list, but reads the result of a single input: it
drops the results of more, or reports a wrong type. In a browser, its User-Agent is the browser's, so there it must be given single inputs.
"""

import operator
from functools import partial, reduce
from typing import Any

from bertserve.service.api.call import JSON_HEADERS, Call
from bertserve.service.api.formats.ignored_fields import is_ignored
from bertserve.service.api.request import RequestContext
from bertserve.service.api.routing import InferenceRoute
from bertserve.service.body.json_text import to_json
from bertserve.service.body.reading import IgnoresField, parse_json, validate_as
from bertserve.service.body.task_body import TaskBody
from bertserve.service.errors import CallerValue, InvalidValueError
from bertserve.service.models.model import Model
from bertserve.service.tasks import classify, fill_mask, question_answering, token_classification, zero_shot
from bertserve.service.tasks.catalog import TASKS

_JS_USER_AGENT = b"@huggingface/inference/"
_JS_READS_ONE = frozenset({classify.TASK, token_classification.TASK, question_answering.TASK, fill_mask.TASK, zero_shot.TASK})


def read_for_task(task: str, body_type: type[TaskBody], raw: bytes, request: RequestContext, ignores: IgnoresField = is_ignored) -> Call:
    """Reads a body of a class at a task's path; it can name a model."""
    body = validate_as(body_type, parse_json(raw, body_type), request.state.limits, ignores)
    return _call(task, request.state.registry.for_task(task, body.model), body, request)


def read_for_model(raw: bytes, request: RequestContext, model: Model | None = None) -> Call:
    """Reads a body for a model, by default the one in the path: for the model's task, or for another that the body's fields identify."""
    model = model or request.named_model
    value = parse_json(raw, TASKS[model.task].body)
    task = request.state.registry.task_of_body(model, value)
    body = validate_as(TASKS[task].body, value, request.state.limits, is_ignored)
    if body.model not in (None, model.name):
        raise InvalidValueError(
            "`model` is `{name}`, but the path names `{model}`; remove one of them.", name=CallerValue(body.model), model=model.name
        )
    return _call(task, model, body, request)


def read_at_base(raw: bytes, request: RequestContext) -> Call:
    """Reads a body at the base URL, the only path of an Inference Endpoint, for the only loaded model."""
    models = list(request.state.registry.models.values())
    if len(models) != 1:
        paths = ", ".join(f"/{spec.path}" for spec in TASKS.values())
        raise InvalidValueError(
            "this path needs exactly one loaded model, and {count} are loaded; send the body to {paths} or /models/NAME.",
            count=len(models),
            paths=paths,
        )
    return read_for_model(raw, request, models[0])


def _call(task: str, model: Model, body: TaskBody, request: RequestContext) -> Call:
    if task not in _JS_READS_ONE or not request.headers.get(b"user-agent", b"").startswith(_JS_USER_AGENT):
        return Call(task, model, body)
    if body.is_list and len(body.items) != 1:
        raise InvalidValueError("@huggingface/inference reads only the answer to one input; send one at a time, or use fetch.")
    return Call(task, model, body, lambda prediction: (to_json(_js_result(task, body, prediction.results)), JSON_HEADERS))


def _js_result(task: str, body: TaskBody, results: list[Any]) -> Any:
    """Returns the result of one input as the client for JavaScript reads it."""
    result = results if body.always_list else results[0]
    if task == token_classification.TASK and isinstance(result, list):  # without an entity group it treats each token as an entity
        return [{"entity_group": item["entity"]} | item if "entity" in item else item for item in result]
    if task == fill_mask.TASK and isinstance(result[0], list):  # it reads one list: the tokens of the first mask, then of the next one
        return [token for mask in result for token in mask]
    return result


def routes() -> list[InferenceRoute]:
    """Returns the routes of single tasks, and the routes that accept any task."""
    specs = TASKS.values()
    route = partial(InferenceRoute, streams=True, tags=["inference"])
    bodies, response_type = tuple(spec.body for spec in specs), reduce(operator.or_, (spec.response_type for spec in specs))
    any_task_route = partial(route, bodies=bodies, response_type=response_type)
    readers = {spec: partial(read_for_task, spec.name, spec.body) for spec in specs}
    return [
        *(route(f"/{spec.path}", read, spec.title, (spec.body,), spec.response_type, task=spec.name) for spec, read in readers.items()),
        any_task_route("/models/{name}", read_for_model, "Run a model by its name, for its own task or one that the body fits"),
        any_task_route("/", read_at_base, "Run the only loaded model"),
        any_task_route("/invocations", read_at_base, "The same as the base URL, for SageMaker"),
    ]
