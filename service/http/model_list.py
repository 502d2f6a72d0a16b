"""The loaded models as OpenAI's API lists them. Clients of KServe's first protocol ask the same paths, and find their keys beside."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from bertserve.service.http.answers import json_answer
from bertserve.service.http.auth import KeyEndpoint
from bertserve.service.http.openapi import endpoints, error_responses
from bertserve.service.serving.build import AppState
from bertserve.service.serving.model import Model

_LIST = "/v1/models"
_NAMED = "/v1/models/{name}"


def router(state: AppState) -> APIRouter:
    """Returns the routes."""
    routes = endpoints(KeyEndpoint, tags=["models"])
    created = int(time.time())  # clients show it; of the models themselves it is not known

    def described(model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "bertserve",
            "task": model.task,
            "name": model.name,
            "ready": model.ready,
        }

    @routes.get(_LIST, summary="All loaded models, as OpenAI's API lists them", responses=error_responses(path=f"{_LIST}/"))
    async def models() -> Response:
        served = state.registry.models.values()
        return json_answer({"object": "list", "data": [described(model) for model in served], "models": [model.name for model in served]})

    @routes.get(_NAMED, summary="One model, as OpenAI's API shows it", responses=error_responses(404, path=_NAMED))
    async def model(name: str) -> Response:
        return json_answer(described(state.registry.get(name)))

    return routes
