"""Examples in the OpenAPI document that run against what is loaded: the names of models, and a body for each model. They follow the models."""

from __future__ import annotations

from typing import Any

from bertserve.service.errors import BertServeError
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.wire.call import Models, Served
from bertserve.service.wire.routes import Route, all_routes


def add_examples(schema: dict[str, Any], models: Models[Any]) -> None:
    """Puts examples into a document, in place of those that an earlier call put there.

    Args:
        schema: The document.
        models: What is loaded.
    """
    answering = _answering(models)
    first = next(iter(answering.values()), None)
    for operations in schema["paths"].values():
        for operation in operations.values():
            _name_model(operation.get("parameters", []), first)
    for route in all_routes():
        content = schema["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
        content.pop("examples", None)
        if examples := _bodies(route, answering):
            content["examples"] = examples


def _answering(models: Models[Any]) -> dict[str, Served]:
    """Returns the model that answers each task, where one does."""
    found = {}
    for task in TASKS:
        try:
            found[task] = models.for_task(task)
        except BertServeError:  # none is loaded, or several of which none is meant
            continue
    return found


def _name_model(parameters: list[dict[str, Any]], model: Served | None) -> None:
    """Gives the parameters of a path a model that there is."""
    for parameter in parameters:
        parameter.pop("example", None)
        if model is not None and parameter["in"] == "path":
            parameter["example"] = model.bundle.version if parameter["name"] == "version" else model.name


def _bodies(route: Route, answering: dict[str, Served]) -> dict[str, Any]:
    """Returns examples of a route that several models answer; of one that is for a task the body's own example does."""
    if route.task in TASKS:
        return {}
    if len(route.bodies) > 1:
        bodies = [(spec.path, spec.body.example(), answering[spec.name]) for spec in TASKS.values() if spec.name in answering]
    else:
        extra: Any = route.bodies[0].model_config.get("json_schema_extra")
        bodies = [("example", extra["examples"][0], model) for model in list(answering.values())[:1]]
    named = "{name}" in route.path
    return {
        name: {"summary": f"{name}, for the model {model.name}", "value": body if named else body | {"model": model.name}}
        for name, body, model in bodies
    }
