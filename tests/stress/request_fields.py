"""Finds every field of every request body in the pydantic models, each with an example body that contains it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from bertserve.service.tasks.body import TaskBody, TaskParameters
from bertserve.service.wire.routes import all_routes

MARK = "\1"  # placeholder for a field's value in a body
# path of a route -> path of a request, with the name of a model
PATHS = {
    "/v2/models/{name}/infer": "/v2/models/sentiment/infer",
    "/v1/models/{name}:predict": "/v1/models/sentiment:predict",
    "/models/{name}": "/models/sentiment",
}
# class -> valid object, in which one value at a time is replaced
OBJECTS: dict[str, dict[str, Any]] = {
    "TextPair": {"text": "A good film.", "text_pair": "A bad one."},
    "Question": {"question": "Where was it built?", "context": "It was built in Porto in 1886."},
    "Choices": {"question": "What is it?", "context": "It is cold.", "choices": ["a film", "a book"]},
    "Sentences": {"source_sentence": "A good film.", "sentences": ["A bad one."]},
    "Document": {"text": "A good film."},
    "InferInput": {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["good"]},
    "InferOutput": {"name": "scores"},
    "ZeroShotParameters": {"candidate_labels": ["film", "book"]},
    "AttentionParameters": {"output_attentions": True},
}


@dataclass(frozen=True)
class Field:
    """A field of a request body.

    Attributes:
        name: `Class.field`, with the class that declares the field.
        path: A path that accepts the body.
        place: Keys and indices that lead to the field in the body.
        body: A body with MARK as the field's value.
        schema: JSON schema of the field's value.
    """

    name: str
    path: str
    place: tuple[str | int, ...]
    body: dict[str, Any]
    schema: dict[str, Any]

    def filled(self, value: bytes) -> bytes:
        return json.dumps(self.body).encode().replace(json.dumps(MARK).encode(), value, 1)


@functools.cache
def all_fields() -> tuple[Field, ...]:
    """Returns all fields of all request bodies, at every place where they occur. If a body has several paths, the first is used."""
    bodies = {body: PATHS.get(route.path, route.path) for route in reversed(all_routes()) for body in route.bodies}
    found: list[Field] = []
    for model, path in reversed(bodies.items()):
        body: dict[str, Any] = json.loads(json.dumps(_example(model)))
        found += _walk(model, path, body, ())
    return tuple(found)


def _example(model: type[BaseModel]) -> dict[str, Any]:
    extra = model.model_config.get("json_schema_extra")
    return extra["examples"][0] if isinstance(extra, dict) and "examples" in extra else {}  # type: ignore[index, return-value]


def _walk(model: type[BaseModel], path: str, body: dict[str, Any], place: tuple[str | int, ...]) -> Iterator[Field]:
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        here = (*place, name)
        declared_by = next(cls for cls in reversed(model.__mro__) if name in getattr(cls, "model_fields", {}) and _declares(cls, name))
        yield Field(f"{declared_by.__name__}.{name}", path, here, _put(body, here, MARK), schema["properties"].get(name, {}))
        nested = list(_models_in(field.annotation))
        if name == "parameters" and issubclass(model, TaskBody) and model.parameters_type is not TaskParameters:
            nested = [(model.parameters_type, False)]
        for inner, in_list in nested:
            at = (*here, 0) if in_list else here
            yield from _walk(inner, path, _put(body, at, OBJECTS.get(inner.__name__, {})), at)


def _declares(cls: type, name: str) -> bool:
    return name in inspect.get_annotations(cls)


def _models_in(annotation: Any, in_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields the models within a type, and whether each is an item of a list. If a model occurs twice, its first place counts."""
    seen: set[type[BaseModel]] = set()

    def look(kind: Any, listed: bool) -> Iterator[tuple[type[BaseModel], bool]]:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind not in seen:
                seen.add(kind)
                yield kind, listed
            return
        for inner in get_args(kind):
            yield from look(inner, listed or getattr(kind, "__origin__", None) is list)

    return look(annotation, in_list)


def _put(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """Returns a copy of a JSON value with `new` at a place. Objects and lists that are missing on the way are created."""
    if not place:
        return new
    step, rest = place[0], place[1:]
    if isinstance(step, int):
        items = value if isinstance(value, list) else []
        return [_put(items[0] if items else None, rest, new), *items[1:]]
    whole = value if isinstance(value, dict) else {}
    return {**whole, step: _put(whole.get(step), rest, new)}
