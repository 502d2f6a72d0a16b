"""What the routes beside inference answer with: a value as JSON, or that nobody is ready."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from service.errors import UnavailableError
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
