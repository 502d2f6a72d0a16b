"""What routes that run no models answer with: a value as JSON, or that the service or a model is not ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from service.errors import NotFoundError, UnavailableError
from service.serving.model import Model
from service.wire.rendering import to_json


def json_answer(value: Any) -> Response:
    """Returns a value as a response of JSON."""
    return Response(to_json(value), media_type="application/json")


def check_ready(ready: bool) -> None:
    """Answers a probe of what is not ready.

    Raises:
        UnavailableError: It is not.
    """
    if not ready:
        raise UnavailableError("the service does not take requests: it is stopping, a lane died, or all lanes hang.")


def probed(find: Callable[[], Model]) -> Model:
    """Returns the model that a probe asks for.

    Args:
        find: Finds it.

    Raises:
        NotFoundError: There is none. Probes need no key, so the message names no models.
    """
    try:
        return find()
    except NotFoundError:
        raise NotFoundError("no such model is loaded; GET /models lists the models.") from None
