"""The routes of the Open Inference Protocol other than `infer`: metadata and probes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from bertserve.service import __version__
from bertserve.service.api.formats.open_inference import metadata
from bertserve.service.api.openapi import endpoints, error_responses
from bertserve.service.api.responses import check_ready, json_answer, probed
from bertserve.service.api_keys import Access
from bertserve.service.models.build import AppState

_FOUND = error_responses(404)


def routers(state: AppState) -> list[APIRouter]:
    """Returns the routes, with one router for each access."""
    probes, models = (endpoints(access, responses=error_responses(), tags=["open inference"]) for access in (Access.PROBE, Access.KEY))

    @models.get("/v2", summary="Name and version of the service")
    async def server() -> Response:
        return json_answer({"name": "bertserve", "version": __version__, "extensions": ["binary_tensor_data"]})

    @probes.get("/v2/health/live", summary="Liveness: the process runs")
    async def live() -> Response:
        return json_answer({"live": True})

    @probes.get("/v2/health/ready", summary="Readiness: requests are answered")
    async def ready() -> Response:
        check_ready(state.scheduler.ready)
        return json_answer({"ready": True, "live": True})

    @models.get("/v2/models/{name}", summary="Inputs and outputs of a model", responses=_FOUND)
    async def described(name: str) -> Response:
        return json_answer(metadata(state.registry.get(name)))

    @probes.get("/v2/models/{name}/ready", summary="Readiness of a model", responses=_FOUND)
    async def model_ready(name: str) -> Response:
        check_ready(probed(lambda: state.registry.get(name)).ready)
        return json_answer({"name": name, "ready": True})

    return [probes, models]
