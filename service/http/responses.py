"""Builds answers: of calls, of routes that run no models, and of probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from bertserve.service.errors import NotFoundError, UnavailableError
from bertserve.service.serving.model import Model
from bertserve.service.serving.work import Prediction
from bertserve.service.wire.call import Call, Content
from bertserve.service.wire.json_text import PIECE_BYTES, json_pieces, to_json

# A longer answer is built on another thread, so that the event loop can serve other requests. One thread is as fast as several, because it
# keeps the GIL most of the time; with several, short requests would wait for each of them.
LONG_BYTES = 2**18
_long_answers = ThreadPoolExecutor(1, thread_name_prefix="long-answers")


async def content_of(call: Call, prediction: Prediction) -> Content:
    """Returns the answer to a call."""
    if prediction.answer_bytes > LONG_BYTES:
        return await asyncio.get_running_loop().run_in_executor(_long_answers, _long_content_of, call, prediction)
    answer = call.answer(prediction)
    return answer if isinstance(answer, Content) else Content([to_json(answer)], "application/json", {})


def _long_content_of(call: Call, prediction: Prediction) -> Content:
    """Builds a long answer. While short requests wait or run, it rests after each piece as long as it worked, to leave them GIL and core."""
    answer = call.answer(prediction)
    if isinstance(answer, Content):
        return answer
    pieces: list[bytes] = []
    start = time.thread_time()
    for piece in json_pieces(answer):
        pieces.append(piece)
        if call.model.has_short_requests:
            time.sleep(time.thread_time() - start)
        start = time.thread_time()
    return Content(pieces, "application/json", {})


async def send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    """Sends a body, or a part of one if `more`; a long one in pieces, in several turns of the event loop.

    The server sends the next piece only when the client has read most of the previous ones, so a connection keeps at most two. TLS
    encrypts a piece in 0.2 ms, and a whole answer of 10 MB in 40 ms.
    """
    start = 0
    while len(body) - start > PIECE_BYTES:
        await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
        await asyncio.sleep(0)
        start += PIECE_BYTES
    await send({"type": "http.response.body", "body": body[start:], "more_body": more})


async def send_pieces(send: Send, pieces: list[bytes]) -> None:
    """Sends the first pieces of a body, in several turns of the event loop, and forgets each one that the client has read."""
    pieces.reverse()
    while pieces:
        await send_body(send, pieces.pop(), more=True)
        if pieces:
            await asyncio.sleep(0)


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
