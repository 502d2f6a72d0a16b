"""Receives from a client: reads a body within its limits, and notices when the client disconnects."""

import asyncio
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from typing import TypeVar

from starlette.types import Receive

from bertserve.service.errors import CLIENT_GONE, HttpError, TooLargeError

_BODY_TIMEOUT, _DISCONNECTED = "the body timed out", "the client disconnected"  # reasons to cancel a task
WATCH_AFTER_S = 0.1  # most requests are answered sooner, and watching each one would cost more than it saves
T = TypeVar("T")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], *, limit: int, timeout_s: float) -> bytes:
    """Reads a body within `timeout_s` seconds, and stops as soon as it exceeds `limit` bytes; `headers` have names in lower case.

    Raises:
        TooLargeError: The body exceeds the limit.
        HttpError: The body was not complete in time (408), or the client disconnected before its end (499).
    """
    declared = headers.get(b"content-length", b"0")
    size = int(declared[-20:]) if declared.isdigit() else 0  # more digits than of 2**64 are leading zeros, and `int` refuses thousands
    body = bytearray()
    task = asyncio.current_task()
    assert task is not None, "called outside a task. This is a bug."
    timer = asyncio.get_running_loop().call_later(timeout_s, task.cancel, _BODY_TIMEOUT)  # `asyncio.timeout` takes four times as long
    try:
        while (size := max(size, len(body))) <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError(CLIENT_GONE, "the client closed the connection while it sent the body.")
            body += message.get("body", b"")
            if len(body) <= limit and not message.get("more_body", False):
                return bytes(body)
    except asyncio.CancelledError as error:
        if error.args != (_BODY_TIMEOUT,):
            raise
        task.uncancel()
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT,
            "the body was not complete within {timeout_s:g} s; send it faster, or in smaller requests.",
            timeout_s=timeout_s,
        ) from None
    finally:
        timer.cancel()
    raise too_large_error("body", size, limit)


def too_large_error(part: str, size: int, limit: int) -> TooLargeError:
    """Returns the error of a body or a line with at least `size` bytes, more than `limit`."""
    return TooLargeError(
        "the {part} has {size} bytes or more and {limit} are allowed; send less at once; the operator can raise --max-body-bytes.",
        part=part,
        size=size,
        limit=limit,
    )


async def until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """Awaits work and cancels it when the client disconnects; the request's body must have been read to the end.

    Raises:
        HttpError: The client disconnected first.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "called outside a task. This is a bug."
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel(_DISCONNECTED)

    timer = loop.call_later(WATCH_AFTER_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError as error:
        if error.args != (_DISCONNECTED,):
            raise
        task.uncancel()
        raise HttpError(CLIENT_GONE, "the client closed the connection before the response.") from None
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()
