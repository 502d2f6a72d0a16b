"""Answers as bytes: of a call, and of routes that run no models; and that the service or a model is not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from bertserve.service.errors import NotFoundError, UnavailableError
from bertserve.service.serving.model import Model
from bertserve.service.serving.work import Prediction
from bertserve.service.wire.call import Call, Content
from bertserve.service.wire.json_text import to_json

# A longer answer is made on another thread, so that the event loop serves other requests meanwhile.
LONG_BYTES = 2**18


async def content_of(call: Call, prediction: Prediction) -> Content:
    """Returns the answer to a call."""
    if prediction.answer_bytes > LONG_BYTES:
        return await asyncio.to_thread(_content, call, prediction)
    return _content(call, prediction)


def _content(call: Call, prediction: Prediction) -> Content:
    answer = call.answer(prediction)
    return answer if isinstance(answer, Content) else Content(to_json(answer), "application/json", {})


def json_answer(value: Any) -> Response:
    """Returns a value as a response of JSON."""
    return Response(to_json(value), media_type="application/json")


def check_ready(ready: bool) -> None:
    """Answers a probe of what is not ready.

    Raises:
        UnavailableError: It is not.
    """
    if not ready:
        raise UnavailableError("not ready: shutting down, an inference thread died, or all inference threads hang.")


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
