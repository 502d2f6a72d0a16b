"""Builds answers: of calls, of routes that run no models, and of probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from bertserve.service.api.call import Call, Content
from bertserve.service.errors import NotFoundError, UnavailableError
from bertserve.service.models.model import Model
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.json_text import to_json


def content_of(call: Call, prediction: Prediction) -> Content:
    """Returns the answer to a call."""
    answer = call.answer(prediction)
    return answer if isinstance(answer, Content) else Content(to_json(answer), "application/json", {})


def json_answer(value: Any) -> Response:
    """Returns a value as a response of JSON."""
    return Response(to_json(value), media_type="application/json")


def check_ready(ready: bool) -> None:
    """Checks the result of a probe.

    Raises:
        UnavailableError: `ready` is false.
    """
    if not ready:
        raise UnavailableError("not ready: shutting down, an inference thread died, or all inference threads hang.")


def probed(find: Callable[[], Model]) -> Model:
    """Returns the model that a probe asks for.

    Raises:
        NotFoundError: The model is not loaded. Probes need no key, so the message names no models.
    """
    try:
        return find()
    except NotFoundError:
        raise NotFoundError("no such model is loaded; GET /models lists the models.") from None
